"""Whether the terminal shows what is typed."""

import contextlib
import sys
import termios
from collections.abc import Iterator


def set_echo(shown: bool) -> bool:
    """Show what is typed on the terminal that stdin is, or hide it; returns whether that changed
    anything. Does nothing where stdin is no terminal."""
    with contextlib.suppress(termios.error, OSError, TypeError, ValueError):  # None, or closed
        settings = termios.tcgetattr(sys.stdin)
        if bool(settings[3] & termios.ECHO) != shown:
            settings[3] ^= termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)
            return True
    return False


@contextlib.contextmanager
def typing_hidden() -> Iterator[None]:
    """Hide what is typed during the block, so that it does not mix with the output. The terminal
    keeps it for the next reader."""
    changed = set_echo(shown=False)
    try:
        yield
    finally:
        if changed:
            set_echo(shown=True)
