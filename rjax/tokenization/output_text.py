"""Generated text with stop strings; text that may start a stop string is held back."""

from collections.abc import Sequence


class OutputText:
    """Append-only text that ends at the first stop string.

    A stop string matches when a character added with ``may_stop`` completes it; it may start in
    earlier text. If several match, the one completed first wins, then the longest. The work per
    added character is proportional to the number and length of the stop strings.

    Args:
        stop: stop strings, none empty.
        include_stop: keep the stop string in the text.
    """

    def __init__(self, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._first = frozenset(s[0] for s in self._stop)
        self._last = frozenset(s[-1] for s in self._stop)
        self._include = include_stop
        self._reach = max((len(s) for s in self._stop), default=1) - 1
        self._pieces: list[str] = []
        self._length = 0
        self._tail = ""
        self._held = 0
        self._sent = 0

    def add(self, new: str, *, may_stop: bool = True) -> str | None:
        """Append text; return the stop string that it completes, if any."""
        if not new:
            return None
        if not self._stop:
            self._pieces.append(new)
            self._length += len(new)
            return None
        window = self._tail + new
        start = self._length - len(self._tail)
        found = self._find(window, len(self._tail)) if may_stop and self._stop else None
        self._pieces.append(new)
        self._length += len(new)
        if found is not None:
            stop, begin = found
            self._cut(start + begin + (len(stop) if self._include else 0))
            return stop
        self._tail = window[-self._reach :] if self._reach else ""
        self._held = 0 if self._include else self._open_stop(self._tail)
        return None

    def close(self) -> None:
        """End the text and release the held-back start of a stop string."""
        self._held = 0

    @property
    def text(self) -> str:
        """The text without a held-back end that may start a stop string."""
        joined = "".join(self._pieces)
        self._pieces = [joined] if joined else []
        return joined[: self._length - self._held]

    def take(self) -> str:
        """The part of ``text`` that was not taken before."""
        start, end = self._sent, self._length - self._held
        if end <= start:
            return ""
        if end == self._length and end - start == len(self._pieces[-1]):
            self._sent = end
            return self._pieces[-1]
        begin, at = self._length, len(self._pieces)
        while begin > start:
            at -= 1
            begin -= len(self._pieces[at])
        self._sent = end
        return "".join(self._pieces[at:])[start - begin : end - begin]

    def _find(self, window: str, old: int) -> tuple[str, int] | None:
        """The first stop string completed after ``old`` characters of ``window``, and its start."""
        if self._last.isdisjoint(window[old:]):
            return None
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            begin = window.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0:
                candidate = (begin + len(stop), begin, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[2], best[1])

    def _open_stop(self, tail: str) -> int:
        """Length of the longest suffix of ``tail`` that is a proper prefix of a stop string."""
        if self._first.isdisjoint(tail):
            return 0
        for begin, char in enumerate(tail):
            if char not in self._first:
                continue
            end = tail[begin:]
            if any(stop.startswith(end) for stop in self._stop if len(stop) > len(end)):
                return len(end)
        return 0

    def _cut(self, length: int) -> None:
        self._pieces = ["".join(self._pieces)[:length]]
        self._length = length
        self._tail = ""
        self._held = 0
