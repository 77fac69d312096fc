"""rjax as users have it: a wheel, a checkout, an editable install, beside modules of their own."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import rjax
from rjax.serve.page.files import PAGE_PATHS, page_file
from tests.bundled import BUNDLED_SIZES

from .distributions import ROOT
from .environment import Environment
from .user_folder import ANSWER, CONVERSATION, MODULES, QUESTION, SYSTEM_PROMPT, UserFolder

pytestmark = pytest.mark.thorough

SIZES = [word for name, value in BUNDLED_SIZES.items() for word in (f"--{name}", str(value))]
SIZES = [word.replace("_", "-") for word in SIZES]


@pytest.mark.parametrize("name", MODULES)
def test_the_users_modules_refuse_others(name: str, user: UserFolder, tmp_path: Path):
    other = tmp_path / "other.py"
    other.write_text(f"import {name}")
    user.run("python3", "-c", f"import {name}")
    with pytest.raises(AssertionError, match=f"other.py imports the user's own {name}"):
        user.run("python3", other, PYTHONPATH=str(user.path))


def test_a_script_with_the_wheel(environment: Environment, user: UserFolder):
    assert user.run_script(environment.python) == environment.site_packages / "rjax"


def test_a_script_with_the_checkout(wheel_environment: Environment, user: UserFolder):
    """PYTHONPATH comes before the wheel; all else is the environment's."""
    found = user.run_script(wheel_environment.python, PYTHONPATH=str(ROOT))
    assert found == ROOT / "rjax"


def test_a_script_with_an_editable_install(
    wheel_environment: Environment, user: UserFolder, tmp_path: Path
):
    environment = wheel_environment.copy(tmp_path / "environment")
    environment.install("-e", f"{ROOT}[serve]")
    assert user.run_script(environment.python) == ROOT / "rjax"


def check_generate(user: UserFolder, *start: str | Path) -> None:
    asked = ("--system-prompt", SYSTEM_PROMPT, "--prompt", QUESTION, "--temperature", "0")
    (found,) = json.loads(user.run(*start, *asked, "--json", *SIZES))["results"]
    assert found["outputs"][0]["text"] == ANSWER


def test_generate(environment: Environment, user: UserFolder):
    check_generate(user, environment.command, "generate")


def test_generate_as_a_module(wheel_environment: Environment, user: UserFolder):
    check_generate(user, wheel_environment.python, "-m", "rjax.generate")


def test_the_commands(wheel_environment: Environment, user: UserFolder):
    command = wheel_environment.command
    assert user.run(command, "--version") == f"rjax {rjax.__version__}\n"
    assert "LlamaForCausalLM" in user.run(command, "models")
    info = json.loads(user.run(command, "info", "--json"))
    assert info["versions"]["rjax"] == rjax.__version__


@contextlib.contextmanager
def serving(command: Path, user: UserFolder) -> Iterator[str]:
    """The URL of ``rjax serve`` on a free port, run in the user's folder."""
    log = user.home / "serve.log"
    with log.open("w") as errors, subprocess.Popen(
        [command, "serve", "--port", "0", "--warmup", "off", "--drain-seconds", "1", *SIZES],
        cwd=user.path, env=user.environment(), stdout=subprocess.PIPE, stderr=errors, text=True,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        line = started.stdout.readline()
        assert " on " in line, log.read_text()
        try:
            yield line.split(" on ")[1].strip().removesuffix("/v1")
        finally:
            started.terminate()
            assert started.wait(60) == 0, log.read_text()


def test_serve(environment: Environment, user: UserFolder):
    body = {"messages": CONVERSATION, "temperature": 0}
    with serving(environment.command, user) as url:
        assert httpx2.get(url + "/health", timeout=60).status_code == 200
        answer = httpx2.post(url + "/v1/chat/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        for path in PAGE_PATHS:
            found = httpx2.get(url + path, timeout=60)
            content, media_type = page_file(path)
            assert found.status_code == 200
            assert found.content == content
            assert found.headers["content-type"].split(";")[0] == media_type
