"""Errors of a command: one line on stderr and an exit status instead of a traceback."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rjax.cli.exit_status import BAD_INPUT, BROKEN_PIPE, INTERRUPTED
from rjax.cli.one_line import one_line
from rjax.console import quiet_imports
from rjax.errors import RjaxError

_OUT_OF_MEMORY = (
    "Free memory, raise its limits (ulimit, container), or lower max_num_batched_tokens, "
    "max_num_seqs or num_pages"
)


def parse_and_run(
    name: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    command: Callable[[argparse.Namespace], int],
) -> int:
    """Parse a command line and run the command's body on it; returns the exit status.

    Args:
        name: name of the command, for its messages.
        parser: parser of the command line. It has printed its help or its error when it ends the
            parsing.
        argv: arguments; None for those of the process.
        command: the body, as for `run_command`.
    """
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else BAD_INPUT
    return run_command(name, lambda: command(arguments))


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command's body and turn exceptions into an exit status.

    Bad input, configurations and checkpoints, unreadable files and lack of memory give status 2,
    Ctrl-C gives 130, a closed pipe gives 141, each with at most one line on stderr. Any other
    exception is a bug in rjax and keeps its traceback.
    """
    quiet_imports()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for any encoding of the terminal
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning(name)
        try:
            status = command()
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # The interpreter flushes stdout once more at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except KeyboardInterrupt:
            _say(name, "interrupted")
            return INTERRUPTED
        except (RjaxError, OSError) as error:
            _say(name, f"error: {one_line(error)}")
            return BAD_INPUT
        except MemoryError:
            _say(name, f"error: the memory of this process is full. {_OUT_OF_MEMORY}")
            return BAD_INPUT
        except (ValueError, RuntimeError) as error:
            if str(error).startswith("RESOURCE_EXHAUSTED"):  # of XLA
                _say(name, f"error: {one_line(error)} {_OUT_OF_MEMORY}")
                return BAD_INPUT
            from rjax.models import CheckpointError

            if not isinstance(error, CheckpointError):
                raise
            _say(name, f"error: {one_line(error)}")
            return BAD_INPUT


def report_error(name: str, error: object) -> None:
    """Print the error of one request among several to stderr, in one line."""
    _say(name, f"error: {one_line(error)}")


def _say(name: str, message: str) -> None:
    print(f"{name}: {message}", file=sys.stderr)


def _show_warning(name: str) -> Callable[..., None]:
    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        _say(name, f"warning: {one_line(message)}")

    return show
