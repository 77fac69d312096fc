"""The command ``rjax``. Imports no JAX, so that its help and its errors are quick."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import rjax
from rjax.cli.process import run_process
from rjax.cli.subcommands import Subcommand, command_lines, run_subcommand

COMMANDS = {
    "generate": Subcommand(
        "rjax.commands.generate", "[--prompt TEXT]", "answer prompts; without any, a demo"
    ),
    "chat": Subcommand(
        "rjax.commands.chat", "[MODEL]", "chat in the terminal, with a model or a server (--url)"
    ),
    "serve": Subcommand(
        "rjax.commands.serve.command", "[MODEL]", "serve a model over HTTP with OpenAI's API"
    ),
    "bench": Subcommand(
        "rjax.commands.bench.command", "NAME", "measure: serve (any server), throughput, latency"
    ),
    "quantize": Subcommand(
        "rjax.commands.quantize",
        "MODEL OUT",
        "write a quantised copy of a model: fp8, int8, int4, awq, mxfp4",
    ),
    "models": Subcommand("rjax.commands.models", "", "list the supported model families"),
    "info": Subcommand(
        "rjax.commands.info", "[MODEL]", "show versions, devices, and the kernels in use and why"
    ),
}

DESCRIPTION = f"""\
rjax {rjax.__version__}: LLM inference in JAX that reads a shared prompt once per step

usage: rjax COMMAND [options]

{command_lines("rjax", COMMANDS)}

first steps:
  rjax generate
      a bundled model answers questions about a table; needs no download and no GPU
  rjax chat Qwen/Qwen3-0.6B
      a model of the Hugging Face hub, or a folder
  rjax serve Qwen/Qwen3-0.6B --max-model-len 8k
      for any OpenAI client, at http://127.0.0.1:8000/v1
  rjax bench serve --url http://127.0.0.1:8000/v1
      latency and throughput of that server, or of any other with the same API

MODEL is a folder or a hub id; without it the bundled model runs. 'rjax COMMAND --help' explains
every option. Flags of vLLM have the same names and units; an unknown one says what to use instead.
"""


def main() -> NoReturn:
    """Run ``rjax`` as the whole process."""
    argv = sys.argv[1:]
    known = bool(argv) and argv[0] in COMMANDS
    run_process(f"rjax {argv[0]}" if known else "rjax", lambda: run(argv))


def run(argv: Sequence[str]) -> int:
    """Run the command that ``argv`` begins with; returns its exit status."""
    if list(argv[:1]) in (["--version"], ["-V"]):
        print(f"rjax {rjax.__version__}")
        return 0
    return run_subcommand("rjax", COMMANDS, argv, DESCRIPTION)


if __name__ == "__main__":
    main()
