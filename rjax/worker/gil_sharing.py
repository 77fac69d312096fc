"""Fair use of Python's interpreter lock."""

import contextlib
import sys
import threading
from collections.abc import Iterator

_INTERVAL = 0.0001  # seconds; Python's own is 0.005
_lock = threading.Lock()
_users: list[float] = []  # the interval before each block that is open


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Have threads give up Python's interpreter lock sooner inside the block.

    A thread that computes in Python, as one that lowers a program, keeps the lock for an interval
    whenever another thread asks for it. The thread that dispatches steps gives it up and asks for
    it many times a step, so that a step beside it would take many times as long.
    """
    with _lock:
        _users.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_INTERVAL, _users[0]))
    try:
        yield
    finally:
        with _lock:
            first = _users[0]
            _users.pop()
            if not _users:
                sys.setswitchinterval(first)
