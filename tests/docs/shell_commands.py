"""The commands in shell blocks, and whether their arguments parse."""

import argparse
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator

import pytest

_OPERATORS = frozenset("|&;<>()")
_FOLDERS = {"bench": ("rjax.benchmarks", "bench")}
"""Where the modules of ``rjax NAME ...`` are, if not in the packages of ``_TOP``."""
_TOP = ("rjax", "rjax.commands")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell block; variables before it and redirections are left
    out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        words.commenters = "#"
        found: list[str] = []
        redirected = False
        for word in words:
            if set(word) <= _OPERATORS:
                redirected = word[0] in "<>"
                if not redirected and found:
                    yield found
                    found = []
            elif redirected:
                redirected = False
            elif found or "=" not in word:
                found.append(word)
        if found:
            yield found


class _ParsedError(Exception):
    """Raised in place of what follows the parsing of the arguments."""


def check_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse the arguments of a command of rjax by its own parser.

    Raises:
        AssertionError: the parser refuses them.
    """
    name, arguments = _module_and_arguments(words)
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # type: ignore[call-overload]
        raise _ParsedError

    module = importlib.import_module(name)
    if not hasattr(module, "main"):
        module = importlib.import_module(f"{name}.__main__")
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [name, *arguments])
        try:
            status = module.main()
        except _ParsedError:
            return
    raise AssertionError(f"{shlex.join(words)}: exit status {status}")


def _module_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """The module of a command and its arguments. MODEL, the first one, becomes ``--model``."""
    if words[0] != "rjax":
        return words[2], words[3:]
    _, name, *arguments = words
    folders = _TOP
    if name in _FOLDERS:
        folders = _FOLDERS[name]
        name, *arguments = arguments
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    found = [f"{folder}.{name}" for folder in folders if _exists(f"{folder}.{name}")]
    assert found, f"there is no command {name}"
    return found[0], arguments


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False
