"""The argument parser of the commands: errors are one line that says what to do."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rjax.cli.exit_status import BAD_INPUT
from rjax.cli.one_line import one_line

_UNKNOWN = "unrecognized arguments: "
_MEANING_LENGTH = 80


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line.

    Args:
        instead: what to use instead of an unknown flag, such as one of vLLM. If it returns None,
            the error names the flag of the nearest spelling and its meaning.
        positional_hint: what to do about an argument that is not a flag.
        settings: settings of ``argparse.ArgumentParser``.
    """

    def __init__(
        self,
        *,
        instead: Callable[[str], str | None] = lambda flag: None,
        positional_hint: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._instead = instead
        self._positional_hint = positional_hint

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line that points to ``--help``."""
        name = self.prog.removeprefix("python -m ")
        self.exit(BAD_INPUT, f"{name}: error: {one_line(self._explained(message))}\n")

    def _explained(self, message: str) -> str:
        if not message.startswith(_UNKNOWN):
            return f"{message} (see --help)"
        given = message.removeprefix(_UNKNOWN).split()[0]
        if not given.startswith("-"):
            hint = f"; {self._positional_hint}" if self._positional_hint else ""
            return f"{message}{hint} (see --help)"
        if (instead := self._instead(given)) is not None:
            return f"{given.split('=')[0]}: {instead} (see --help)"
        near = self._nearest(given.split("=")[0])
        return f"{message} ({near}see --help)"

    def _nearest(self, flag: str) -> str:
        owners = {name: action for action in self._actions for name in action.option_strings}
        for name in difflib.get_close_matches(flag, owners, n=1):
            return f"did you mean {name}?{_meaning(owners[name])} "
        return ""


class NoOp(argparse.Action):
    """A flag that is accepted for vLLM's sake; a line on stderr says once why it has no effect.

    Args:
        reason: why the flag has no effect.
        settings: settings of ``argparse.Action``.
    """

    def __init__(self, *, reason: str, **settings: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **settings)
        self._reason = reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if self.dest not in namespace:
            text = f"{parser.prog}: {option_string} has no effect: {self._reason}"
            print(text, file=sys.stderr)
        setattr(namespace, self.dest, True)


def add_no_ops(group: Any, flags: Mapping[str, str]) -> None:
    """Add flags that have no effect, with the reason for each."""
    for flag, reason in flags.items():
        help = f"no effect: {reason}".replace("%", "%%")
        group.add_argument(flag, action=NoOp, reason=reason, help=help)


def _meaning(action: argparse.Action) -> str:
    """The first sentence of a flag's help, if it is short."""
    text = (action.help or "").replace("%%", "%").split(" (default")[0]
    first = text.split("; ")[0].split(". ")[0].rstrip(".:")
    return f" {first[0].upper()}{first[1:]};" if 0 < len(first) <= _MEANING_LENGTH else ""
