"""A grammar as the token masks of the sequences that follow it."""

import time
from typing import NoReturn

import llguidance
import llguidance.numpy
import numpy as np
from jaxtyping import UInt32

from rjax.structured.grammar import brief

_SECONDS_PER_TOKEN = 0.001  # of mask work that each token adds to a request's budget


class MaskBudget:
    """The time that the masks of one request may take: its steps hold up everybody's.

    Args:
        seconds: to begin with; each token adds a little.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    def spend(self, seconds: float) -> bool:
        """Take the time of one token's mask; whether it was there."""
        self._left += _SECONDS_PER_TOKEN - seconds
        return self._left >= 0


class GrammarMask:
    """A `rjax.batch.token_mask.TokenMask` over one llguidance matcher.

    Args:
        matcher: at its start, without an error; it becomes this mask's own.
        bitmask: of its first token.
        budget: of the request.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, bitmask: np.ndarray, budget: MaskBudget
    ) -> None:
        self._matcher = matcher
        self._bitmask = bitmask
        self._budget = budget
        self.failure: str | None = None
        """Why the grammar could not go on, if it could not."""

    @property
    def bitmask(self) -> UInt32[np.ndarray, " W"]:
        """The allowed tokens' bits."""
        return self._bitmask[0].view(np.uint32)

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            ValueError: the matcher cannot go on, or takes too long.
        """
        start = time.perf_counter()
        if not self._matcher.consume_token(token_id):
            self._fail("the grammar cannot go on")
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bitmask)
        if self._matcher.is_error() or not self._bitmask.any():
            self._fail("no token fits the grammar")
        if not self._budget.spend(time.perf_counter() - start):
            self._fail("the grammar takes too long at each token")

    def _fail(self, message: str) -> NoReturn:
        self.failure = f"{message}: {brief(self._matcher.get_error())}".removesuffix(": ")
        raise ValueError(self.failure)


def first_bitmask(matcher: llguidance.LLMatcher, vocab_size: int) -> np.ndarray:
    """The bits of the first token under a matcher at its start, [1, W].

    Raises:
        ValueError: no token may come first.
    """
    bitmask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    llguidance.numpy.fill_next_token_bitmask(matcher, bitmask)
    if matcher.is_error() or not bitmask.any():
        raise ValueError(
            f"the constraint allows no text: {brief(matcher.get_error())}".removesuffix(": ")
        )
    return bitmask


def start_masks(
    matcher: llguidance.LLMatcher, vocab_size: int, count: int, seconds: float
) -> list[GrammarMask]:
    """Masks of the samples of one request.

    Args:
        matcher: at its start; it stays so.
        vocab_size: width of the logits.
        count: samples.
        seconds: that their masks may take together, beyond a little for each token.

    Raises:
        ValueError: no token may come first.
    """
    first = matcher.deep_copy()
    bitmask = first_bitmask(first, vocab_size)
    budget = MaskBudget(seconds)
    return [GrammarMask(first.deep_copy(), bitmask.copy(), budget) for _ in range(count)]
