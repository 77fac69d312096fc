"""The command ``rjax chat``."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rjax.chat.sampling_values import NOT_IN_CHAT
from rjax.chat.turns import read_turn
from rjax.cli.arguments import (
    add_engine_arguments,
    add_model_argument,
    add_sampling_arguments,
    flag_of,
    given_engine_options,
    sampling_options,
)
from rjax.cli.bundled import BUNDLED_NAME
from rjax.cli.errors import parse_and_run
from rjax.cli.exit_status import FAILED
from rjax.cli.parser import OneLineParser
from rjax.cli.prompts import read_text
from rjax.cli.terminal import typing_hidden
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.vllm.options import instead_of

if TYPE_CHECKING:  # these import JAX, which --help does not need
    from rjax.chat.backends import ChatBackend
    from rjax.chat.session import Session

_NAME = "rjax chat"
_WARMUP = "auto"

_EPILOG = """\
examples:
  rjax chat
      the bundled model, locally or on a server, with a table of people as its system message
  rjax chat --model ./llama --system "Be brief."
  rjax chat --url http://127.0.0.1:8000/v1 --api-key-file key.txt
      a server that speaks OpenAI's API
  printf 'Who lives in Peru?\\nHow old is she?\\n' | rjax chat
      one question per line, all in one conversation

exit status: 0 done, 1 an error with input from a pipe (the other lines are still answered), 2 bad
input, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=_NAME,
        usage="%(prog)s [MODEL] [options]",
        description="Chat in the terminal with a local model or a server's; /help lists the "
        "commands.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        instead=instead_of,
    )
    add_model_argument(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--url", help="a server's URL; MODEL is then its served model name")
    chat.add_argument("--api-key", metavar="KEY", help="the server's API key")
    chat.add_argument("--api-key-file", metavar="FILE", help="the same from a file")
    system = chat.add_mutually_exclusive_group()
    system.add_argument("--system", metavar="TEXT", help="the system message")
    system.add_argument("--system-file", metavar="FILE", help="the same from a UTF-8 file")
    chat.add_argument("--no-stats", action="store_true", help="no statistics after each answer")
    add_engine_arguments(parser, {"warmup": _WARMUP})
    add_sampling_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(_NAME, build_parser(), argv, _chat)


def _chat(arguments: argparse.Namespace) -> int:
    sampling = sampling_options(arguments)
    for name in NOT_IN_CHAT:
        if name in sampling:
            raise InvalidConfigError(f"--{name.replace('_', '-').lstrip('-')} has no use in a chat")
    from rjax.chat.session import Session
    from rjax.sampling import SamplingParams

    SamplingParams.from_options(sampling)
    system = _system(arguments)
    interactive = sys.stdin.isatty()
    backend = _backend(arguments, sampling, stoppable=interactive)
    demo = system is None and "model" not in arguments and backend.name == BUNDLED_NAME
    if demo:
        from rjax.models.tables.demo import demo_system_prompt

        system = demo_system_prompt()
    session = Session(backend, system, show_stats=not arguments.no_stats, stoppable=interactive)
    if not interactive:
        return _answer_lines(session)
    with contextlib.suppress(ImportError):
        import readline  # line editing and history for input()

        del readline
    about = "; /system shows the table that it is asked about" if demo else ""
    print(f"{backend.name}{about}. /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
    return _converse(session)


def _converse(session: "Session") -> int:
    """Read turns from a terminal until the user leaves; one Ctrl-C does not leave."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def read_line(prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            try:
                turn = read_turn(read_line)
            except KeyboardInterrupt:
                print("\n(Ctrl-D, /exit or Ctrl-C twice leaves)", file=sys.stderr)
                continue
            if turn is None:
                return 0
            with typing_hidden():  # the next prompt shows it
                if not session.take(turn):
                    return 0
    finally:
        signal.signal(signal.SIGINT, before)


def _answer_lines(session: "Session") -> int:
    """Run the turns of stdin, usually one per line; return the exit status."""

    def read_line(_: str) -> str | None:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequestError("stdin: not UTF-8 text; convert it") from error
        return line.removesuffix("\n") if line else None

    while (turn := read_turn(read_line)) is not None and session.take(turn):
        pass
    return FAILED if session.failed else 0


def _system(arguments: argparse.Namespace) -> str | None:
    if arguments.system_file is not None:
        return read_text(arguments.system_file, "--system-file")
    return arguments.system


def _backend(arguments: argparse.Namespace, sampling: dict, *, stoppable: bool) -> "ChatBackend":
    from rjax.chat.backends import LocalBackend, RemoteBackend

    if arguments.url is not None:
        options = given_engine_options(arguments)
        given = [key for key in options if key not in ("model", "seed")]
        if options["warmup"] == _WARMUP:  # whether given or not
            given.remove("warmup")
        if given:
            raise InvalidConfigError(
                f"{flag_of(given[0])} is an option of the server; leave it out with --url"
            )
        key = arguments.api_key
        if arguments.api_key_file is not None:
            key = read_text(arguments.api_key_file, "--api-key-file").strip()
        return RemoteBackend(arguments.url, vars(arguments).get("model"), key, sampling)
    if arguments.api_key_file is not None or arguments.api_key is not None:
        raise InvalidConfigError("an API key goes with --url")
    options = given_engine_options(arguments)
    if "chat_template" in arguments:
        options["chat_template"] = read_text(arguments.chat_template, "--chat-template")
    from rjax.build.engine_builder import build_engine
    from rjax.build.summary import summary_lines
    from rjax.config import EngineConfig

    engine = build_engine(EngineConfig.from_options({"use_tqdm": sys.stderr.isatty(), **options}))
    if stoppable:
        print("\n".join(summary_lines(engine.summary)), file=sys.stderr)
    name = options.get("model") or BUNDLED_NAME
    return LocalBackend(engine, name, sampling, stoppable=stoppable)
