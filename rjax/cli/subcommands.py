"""Finds a command by its name and runs it; the others are not imported."""

import dataclasses
import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence

from rjax.cli.exit_status import BAD_INPUT


@dataclasses.dataclass(frozen=True, slots=True)
class Subcommand:
    """A command of its own module.

    Attributes:
        module: has ``main(argv)``, which returns the exit status.
        arguments: the most common ones, for the list of commands.
        summary: one line for the list of commands.
    """

    module: str
    arguments: str
    summary: str


def run_subcommand(
    name: str, commands: Mapping[str, Subcommand], argv: Sequence[str], description: str
) -> int:
    """Run the command that ``argv`` begins with; returns its exit status.

    Without arguments, and for ``--help``, the description is printed. An unknown name is an error
    that suggests the nearest one.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(description, end="")
        return 0
    given, *rest = argv
    if given not in commands:
        print(f"{name}: error: {_unknown(name, given, commands)}", file=sys.stderr)
        return BAD_INPUT
    return importlib.import_module(commands[given].module).main(rest)


def command_lines(name: str, commands: Mapping[str, Subcommand]) -> str:
    """The commands with their summaries in two aligned columns."""
    heads = [f"{name} {key} {command.arguments}".rstrip() for key, command in commands.items()]
    width = max(map(len, heads))
    return "\n".join(
        f"  {head:{width}}  {command.summary}"
        for head, command in zip(heads, commands.values(), strict=True)
    )


def _unknown(name: str, given: str, commands: Mapping[str, Subcommand]) -> str:
    if given.startswith("-"):
        first = next(iter(commands))
        return f"give a command before {given}, as in '{name} {first} {given}' (see {name} --help)"
    near = difflib.get_close_matches(given, commands, n=1, cutoff=0.5)
    hint = f"did you mean '{name} {near[0]}'?" if near else f"give {', '.join(commands)}"
    return f"there is no command {given!r}: {hint} (see {name} --help)"
