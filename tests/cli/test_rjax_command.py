"""The command ``rjax``: help, names of commands, and what it imports."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rjax
from rjax import __main__ as command
from rjax.commands.bench import command as benchmarks

ROOT = Path(__file__).parents[2]


def test_the_entry_point_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["rjax"].partition(":")
    assert getattr(importlib.import_module(module), name) is command.main


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_it_teaches(argv, capsys):
    assert command.run(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "first steps:" in out
    for name in command.COMMANDS:
        assert f"rjax {name}" in out


def test_version(capsys):
    assert command.run(["--version"]) == 0
    assert capsys.readouterr().out == f"rjax {rjax.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serv"], "there is no command 'serv': did you mean 'rjax serve'?"),
        (["benhc", "serve"], "did you mean 'rjax bench'?"),
        (["xyz"], "give generate, chat, serve, bench, quantize, models, info"),
        (["--model", "x"], "give a command before --model, as in 'rjax generate --model'"),
        (["bench", "latncy"], "rjax bench: error: there is no command 'latncy': did you mean"),
        (["bench", "--url", "x"], "as in 'rjax bench serve --url'"),
        (["generate", "Hello"], "unrecognized arguments: Hello; give a prompt as --prompt"),
    ],
)
def test_a_wrong_name_is_one_line(argv, said, capsys):
    assert command.run(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_bench_lists_its_benchmarks(capsys):
    assert command.run(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(f"rjax bench {name}" in out for name in benchmarks.COMMANDS)


def test_help_and_errors_import_no_jax():
    every = [[name] for name in command.COMMANDS] + [
        ["bench", name] for name in benchmarks.COMMANDS
    ]
    code = f"""
import sys
from rjax.__main__ import run
for argv in {every!r}:
    status = run([*argv, "--help"])
    assert status == 0, (argv, status)
    if argv != ["bench"]:
        assert run([*argv, "--no-such-flag"]) == 2
assert run(["serv"]) == 2
assert not {{"jax", "flax", "transformers"}} & set(sys.modules), "slow imports"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: rjax serve [MODEL] [options]" in done.stdout


def test_the_modules_are_commands_too():
    for module, usage in (
        ("rjax.generate", "usage: rjax generate"),
        ("rjax.chat", "usage: rjax chat"),
        ("rjax.serve", "usage: rjax serve"),
        ("rjax.quantize", "usage: rjax quantize MODEL OUT"),
        ("rjax", "usage: rjax COMMAND"),
        ("rjax.benchmarks", "usage: rjax bench NAME"),
    ):
        argv = [sys.executable, "-m", module, "--help"]
        assert usage in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
