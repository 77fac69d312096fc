"""The commands in shell blocks, and whether their arguments parse."""

import argparse
import importlib
import shlex
import sys
from collections.abc import Iterator

import pytest

_OPERATORS = frozenset("|&;<>()")
_MODULES = {
    ("generate",): "rjax.generate",
    ("chat",): "rjax.chat.__main__",
    ("serve",): "rjax.serve.__main__",
    ("bench", "serve"): "bench.serve",
}
"""The module of each ``rjax`` command."""


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
    if words[0] == "rjax":
        size = 2 if words[1] == "bench" else 1
        name, arguments = _MODULES[tuple(words[1 : 1 + size])], words[1 + size :]
        if arguments and not arguments[0].startswith("-"):
            arguments = ["--model", *arguments]
    else:
        _, _, name, *arguments = words
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
