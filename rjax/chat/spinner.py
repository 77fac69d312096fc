"""A spinner that shows that a terminal waits for an answer."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

_FRAMES = "|/-\\"
_DELAY = 0.2  # seconds before it is shown: quick answers need none
_INTERVAL = 0.1


class Spinner:
    """Shows a moving sign and the seconds, on one line that `stop` erases.

    Args:
        stream: where to draw; nothing is drawn unless it is a terminal.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if stream.isatty():
            self._thread = threading.Thread(target=self._draw, name="rjax-spinner", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Erase it; stopping twice does nothing."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _draw(self) -> None:
        start = time.monotonic()
        if self._stopped.wait(_DELAY):
            return
        frame = 0
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            while True:
                seconds = time.monotonic() - start
                text = f"{_FRAMES[frame % len(_FRAMES)]} {seconds:.0f} s, Ctrl-C stops"
                self._stream.write(f"\r\x1b[2m{text}\x1b[0m")
                self._stream.flush()
                if self._stopped.wait(_INTERVAL):
                    break
                frame += 1
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


@contextlib.contextmanager
def spinning(stream: Any) -> Iterator[Spinner]:
    """A spinner for the block, if it is not stopped before."""
    spinner = Spinner(stream)
    try:
        yield spinner
    finally:
        spinner.stop()
