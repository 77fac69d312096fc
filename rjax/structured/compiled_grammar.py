"""CompiledGrammar: a compiled constraint, and the lexer that its masks share."""

import llguidance
import numpy as np

from rjax.structured.grammar_store import GrammarStore

_SHARED_FROM = 0.02  # seconds of a compilation; a quicker one is done for each request
_SHARED_FOR = 2.0  # seconds of masks for each second of the compilation
# Bounds of the growth in bytes for each second of masks: resident memory also grows for other
# reasons, and does not grow where freed memory is used again.
_MOST_GROWTH, _LEAST_GROWTH = 2**30, 2**27
_QUICK = 0.001  # seconds of a mask that hardly adds memory
_CHECK_BYTES = 2**20  # growth from which the store looks at all grammars again


class CompiledGrammar:
    """A constraint in its initial state, for the masks of one request or one owner.

    Copies of an llguidance matcher share one lexer, which adds states for every new text. Once the
    lexer has exceeded a limit, every copy fails, even in its initial state. So a request has a
    grammar of its own, except where compiling it takes long: then the requests of one owner share
    it, until it has failed or its masks took longer than ``_SHARED_FOR`` compilations.

    Args:
        matcher: in its initial state; from now on it is only copied.
        bitmask: of the first token, from `rjax.structured.mask.first_bitmask`.
        store: that counts this grammar.
        num_bytes: that the compilation took.
        seconds: that the compilation took.

    Attributes:
        failure: why all masks have to end; None if they need not.
        num_bytes: an estimate of its memory now.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        bitmask: np.ndarray,
        store: GrammarStore,
        *,
        num_bytes: int,
        seconds: float,
    ) -> None:
        self._matcher = matcher
        self._bitmask = bitmask
        self._store = store
        self._compiled_bytes = self._checked_bytes = self.num_bytes = num_bytes
        self._grown = 0
        self._slow_seconds = 0.0
        self._seconds_left = _SHARED_FOR * seconds if seconds >= _SHARED_FROM else 0.0
        self.failure: str | None = None

    def start(self) -> tuple[llguidance.LLMatcher, np.ndarray]:
        """A copy of the matcher in its initial state, and of its first bitmask."""
        return self._matcher.deep_copy(), self._bitmask.copy()

    @property
    def shared(self) -> bool:
        """Whether later requests may use it too."""
        return self._seconds_left > 0 and self.failure is None

    def failed(self) -> None:
        """Give it to no later request, because a copy failed, which may be the lexer's end."""
        self._seconds_left = 0.0
        self._store.check()

    def resident(self) -> int:
        """Resident memory before a mask, for `count`."""
        return self._store.resident()

    def count(self, seconds: float, resident: int) -> None:
        """Count a mask.

        Args:
            seconds: that the mask took.
            resident: memory of the process before the mask.
        """
        shared = self.shared
        self._seconds_left -= seconds
        self._slow_seconds += max(0.0, seconds - _QUICK)
        grown = min(self._store.resident() - resident, int(seconds * _MOST_GROWTH))
        self._grown += max(0, grown)
        least = int(self._slow_seconds * _LEAST_GROWTH)
        self.num_bytes = self._compiled_bytes + max(self._grown, least)
        if shared != self.shared or self.num_bytes - self._checked_bytes >= _CHECK_BYTES:
            self._checked_bytes = self.num_bytes
            self._store.check()
