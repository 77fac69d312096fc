"""CompiledGrammar: a compiled constraint, and the lexer that its masks share."""

import llguidance
import numpy as np

from rjax.structured.grammar_store import GrammarStore

_QUICK = 0.001  # seconds of a mask that hardly adds memory
# Seconds beyond that which the masks of a grammar may take while it is shared: for each second of
# its compilation, and in any case.
_SHARED_FOR, _SHARED_AT_LEAST = 2.0, 0.04
# Bounds of the growth in bytes for each second of slow masks: resident memory also grows for other
# reasons, and does not grow where freed memory is used again.
_MOST_GROWTH, _LEAST_GROWTH = 2**30, 2**27
_CHECK_BYTES = 2**20  # growth from which the store looks at all grammars again


class CompiledGrammar:
    """A constraint in its initial state, for the masks of one owner's requests.

    Copies of an llguidance matcher share one lexer, which adds states for every new text: later
    masks are quicker. Once the lexer has exceeded a limit, every copy fails, even in its initial
    state. So the requests of different owners never share a grammar, and those of one owner get a
    new one after a failure, and after slow masks, which are those that make the lexer grow.

    Args:
        matcher: matcher in its initial state; from now on it is only copied.
        bitmask: bitmask of the first token, from `rjax.structured.mask.first_bitmask`.
        store: the store that counts this grammar.
        num_bytes: bytes of memory that the compilation took.
        seconds: seconds that the compilation took.

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
        self._seconds_left = max(_SHARED_FOR * seconds, _SHARED_AT_LEAST)
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

    def count(self, seconds: float) -> None:
        """Count the time of a mask."""
        slow = seconds - _QUICK
        if slow <= 0:
            return
        shared = self.shared
        self._seconds_left -= slow
        self._slow_seconds += slow
        self._grown += max(0, min(self._store.growth(), int(seconds * _MOST_GROWTH)))
        least = int(self._slow_seconds * _LEAST_GROWTH)
        self.num_bytes = self._compiled_bytes + max(self._grown, least)
        if shared != self.shared or self.num_bytes - self._checked_bytes >= _CHECK_BYTES:
            self._checked_bytes = self.num_bytes
            self._store.check()
