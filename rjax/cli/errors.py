"""How a command ends: at most one line on stderr and an exit status, never a traceback."""

import argparse
import difflib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from rjax.cli.process import INTERRUPTED
from rjax.cli.report import one_line
from rjax.errors import RjaxError

BAD_INPUT = 2
BROKEN_PIPE = 141


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with status 2; the usage is a ``--help`` away."""
        near = self._nearest(message.removeprefix("unrecognized arguments: ").split()[0])
        hint = f"did you mean {near}? " if "unrecognized arguments: -" in message and near else ""
        name = self.prog.split()[-1]
        self.exit(BAD_INPUT, f"{name}: error: {one_line(message)} ({hint}see --help)\n")

    def _nearest(self, flag: str) -> str | None:
        known = [name for action in self._actions for name in action.option_strings]
        return next(iter(difflib.get_close_matches(flag.split("=")[0], known, n=1)), None)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command's body and turn what goes wrong into an exit status.

    Bad input, configurations, checkpoints, unreadable files and lack of memory end with status 2,
    Ctrl-C with 130, a reader that went away with 141, each after at most one line. Anything else is
    a defect of rjax and keeps its traceback.
    """
    _quiet_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning(name)
        try:
            status = command()
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Nobody reads any more, so the interpreter's last flush must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        except KeyboardInterrupt:
            _say(name, "interrupted")
            return INTERRUPTED
        except (RjaxError, OSError) as error:
            _say(name, f"error: {one_line(error)}")
            return BAD_INPUT
        except ValueError as error:
            from models import CheckpointError

            if not isinstance(error, CheckpointError):
                raise
            _say(name, f"error: {one_line(error)}")
            return BAD_INPUT


def report_error(name: str, error: object) -> None:
    """Say on stderr, in one line, what was wrong with one request among others."""
    _say(name, f"error: {one_line(error)}")


def _say(name: str, message: str) -> None:
    print(f"{name}: {message}", file=sys.stderr)


def _show_warning(name: str) -> Callable[..., None]:
    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        _say(name, f"warning: {one_line(message)}")

    return show


def _quiet_libraries() -> None:
    """Keep remarks about missing GPUs and PyTorch out of a command's output."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    logging.getLogger("transformers").addFilter(
        lambda record: not record.getMessage().startswith("PyTorch was not found")
    )
