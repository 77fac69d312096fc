"""The commands in shell blocks, and whether their arguments parse."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rjax.__main__ import run

_OPERATORS = frozenset("|&;<>()")


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
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: object) -> None:
        parse(self, *given)  # type: ignore[call-overload]
        raise _ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        try:
            if words[0] == "rjax":
                status = run(words[1:])
            else:
                _, _, name, *arguments = words
                patch.setattr(sys, "argv", [name, *arguments])
                status = _module(name).main()
        except _ParsedError:
            return
    raise AssertionError(f"{shlex.join(words)}: exit status {status}")


def _module(name: str) -> Any:
    """The module whose ``main`` is run by ``python -m name``."""
    module = importlib.import_module(name)
    if hasattr(module, "main"):
        return module
    if name.startswith("bench."):
        return importlib.import_module(f"{name}.__main__")
    command = name.removeprefix("rjax.").replace("benchmarks", "bench")
    return importlib.import_module(f"rjax.commands.{command}")
