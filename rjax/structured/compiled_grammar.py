"""CompiledGrammar: a compiled constraint, and the state of the lexer that its masks share."""

import llguidance
import numpy as np


class CompiledGrammar:
    """A constraint in its initial state, for the masks of one owner.

    Copies of an llguidance matcher share one lexer, which adds a state for every new text. Once the
    lexer has exceeded a limit, every copy fails, even in its initial state. A failed grammar is
    therefore compiled anew for later requests, and no two owners share one.

    Args:
        matcher: in its initial state; from now on it is only copied.
        bitmask: of the first token, from `rjax.structured.mask.first_bitmask`.

    Attributes:
        failed: whether a copy failed, so that no new mask may use this grammar.
    """

    def __init__(self, matcher: llguidance.LLMatcher, bitmask: np.ndarray) -> None:
        self._matcher = matcher
        self._bitmask = bitmask
        self.failed = False

    def start(self) -> tuple[llguidance.LLMatcher, np.ndarray]:
        """A copy of the matcher in its initial state, and of its first bitmask."""
        return self._matcher.deep_copy(), self._bitmask.copy()
