"""Runs ``rjax bench``: finds the benchmark by its name."""

import sys
from collections.abc import Sequence

from rjax.cli.subcommands import Subcommand, command_lines, run_subcommand

COMMANDS = {
    "serve": Subcommand(
        "rjax.commands.bench.serve",
        "--url URL",
        "latency of a server under load; any OpenAI server",
    ),
    "throughput": Subcommand(
        "rjax.commands.bench.throughput",
        "[MODEL]",
        "tokens per second of the engine, without a server",
    ),
    "latency": Subcommand(
        "rjax.commands.bench.latency",
        "[MODEL]",
        "time to first token and inter-token latency of it",
    ),
}

DESCRIPTION = f"""\
usage: rjax bench NAME [options]

{command_lines("rjax bench", COMMANDS)}

Prompts share a prefix, whose length you choose. 'rjax bench NAME --help' explains every option.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments begin with; returns its exit status."""
    given = sys.argv[1:] if argv is None else argv
    return run_subcommand("rjax bench", COMMANDS, given, DESCRIPTION)
