"""A command as a process: Ctrl-C ends it within a second, with status 130.

A process that is interrupted ends by ``os._exit``. The interpreter's own exit would wait for
threads inside XLA's compiler, which cannot be interrupted, or destroy what they use: the process
hangs for as long as they compile, or aborts. Child processes end by themselves, because the sockets
to them are closed.

Imports little, so that it handles Ctrl-C during the imports of the command.
"""

import contextlib
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from rjax.batch.compile_progress import COMPILE_THREAD
from rjax.cli.exit_status import INTERRUPTED
from rjax.cli.terminal import set_echo
from rjax.tokenization.without_torch import leave_torch_out

_PATIENCE = 0.5  # seconds that the main thread has to end by itself
_TWICE = 1.0  # seconds between two Ctrl-C that end any process


def run_process(name: str, main: Callable[[], int]) -> NoReturn:
    """Run a command as the whole process, and exit with the status that ``main`` returns.

    Ctrl-C raises KeyboardInterrupt as usual. If the process does not end within half a second (the
    main thread is in a compiler, or a library turned the exception into another one), it exits at
    once with status 130. A command that handles SIGINT itself is not affected, unless Ctrl-C comes
    twice within a second; it can call `end_soon`.

    At the end the process does not wait for programs that compile in the background.

    Args:
        name: name of the command, for its last line.
        main: returns the exit status.
    """
    leave_torch_out()
    with _interrupts_watched(name) as interrupted:
        try:
            status = main()
        except KeyboardInterrupt:
            _end(name)
        except BaseException:
            if interrupted.wait(0.05):  # the watcher may be late
                _end(name)
            raise
        if status == INTERRUPTED or interrupted.is_set():
            _end()
    if any(thread.name == COMPILE_THREAD for thread in threading.enumerate()):
        _end(status=status)  # which can be neither stopped nor of use
    sys.exit(status)


def run_module(name: str, module: str) -> NoReturn:
    """`run_process` with the ``main`` of a module that is imported first."""
    run_process(name, lambda: importlib.import_module(module).main())


def end_soon(name: str) -> None:
    """Exit with status 130 in half a second, unless the process ends before."""

    def wait() -> None:
        time.sleep(_PATIENCE)
        _end(name)

    threading.Thread(target=wait, name="rjax-end", daemon=True).start()


@contextlib.contextmanager
def _interrupts_watched(name: str) -> Iterator[threading.Event]:
    """Set the event on Ctrl-C, and exit if the block still runs half a second later."""
    interrupted, left = threading.Event(), threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        last = -math.inf
        while found := os.read(reader, 1):
            if found[0] != signal.SIGINT or left.is_set():
                continue
            now, before = time.monotonic(), last
            last = now
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                interrupted.set()
                if not left.wait(_PATIENCE):
                    _end(name)
            elif now - before < _TWICE:
                _end(name)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="rjax-interrupts", daemon=True).start()
    try:
        yield interrupted
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def _end(name: str | None = None, status: int = INTERRUPTED) -> NoReturn:
    """Exit at once, after flushing the output; the terminal shows again what is typed."""
    set_echo(shown=True)
    if name is not None:
        with contextlib.suppress(OSError, ValueError):
            start = "\n" if sys.stderr.isatty() else ""  # after a progress bar or "^C"
            print(f"{start}{name}: interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
