"""Token masks of a grammar for the sequences of a request."""

import time
from typing import NoReturn

import llguidance
import llguidance.numpy
import numpy as np
from jaxtyping import UInt32

from rjax.errors import GrammarFailedError
from rjax.structured.compiled_grammar import CompiledGrammar
from rjax.structured.grammar import brief
from rjax.structured.mask_budget import MaskBudget


class GrammarMask:
    """A `rjax.batch.token_mask.TokenMask` over one copy of a grammar's matcher.

    Args:
        grammar: the grammar whose lexer the mask uses.
        vocab_size: width of the logits.
        budget: the request's time budget.
    """

    may_be_slow = True  # see `TokenMask`

    def __init__(self, grammar: CompiledGrammar, vocab_size: int, budget: MaskBudget) -> None:
        self._grammar = grammar
        self._matcher, self._bitmask = grammar.start()
        self._vocab_size = vocab_size
        self._budget = budget

    @property
    def bitmask(self) -> UInt32[np.ndarray, " W"]:
        """Bitmask of the allowed tokens."""
        return self._bitmask[0, : -(-self._vocab_size // 32)].view(np.uint32)

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token.

        Raises:
            GrammarFailedError: the matcher failed or exceeded its budget.
        """
        grammar = self._grammar
        if (refusal := grammar.failure or self._budget.refusal()) is not None:
            raise GrammarFailedError(refusal)
        start = time.thread_time()
        if not self._matcher.consume_token(token_id):
            self._fail("the grammar cannot go on")
        _fill(self._matcher, self._bitmask, self._vocab_size)
        if self._matcher.is_error() or not self._bitmask.any():
            self._fail("no token fits the grammar")
        seconds = time.thread_time() - start
        grammar.count(seconds)
        if not self._budget.spend(seconds):
            self._fail(self._budget.exceeded)

    def _fail(self, message: str) -> NoReturn:
        failure = f"{message}: {brief(self._matcher.get_error())}".removesuffix(": ")
        if self._matcher.is_error():
            self._grammar.failed()
        raise GrammarFailedError(failure)


def first_bitmask(
    matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, vocab_size: int
) -> np.ndarray:
    """The bitmask of the first token of a matcher in its initial state.

    Args:
        matcher: the grammar's matcher.
        tokenizer: the matcher's tokenizer.
        vocab_size: width of the logits.

    Returns:
        [1, W] int32 with a bit for each token of ``tokenizer``, which may have more than the
        logits; the bits of the others are 0.

    Raises:
        ValueError: no first token is allowed.
    """
    bitmask = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
    _fill(matcher, bitmask, vocab_size)
    if matcher.is_error() or not bitmask.any():
        raise ValueError(
            f"the constraint allows no text: {brief(matcher.get_error())}".removesuffix(": ")
        )
    return bitmask


def _fill(matcher: llguidance.LLMatcher, bitmask: np.ndarray, vocab_size: int) -> None:
    """Write the bitmask of the next token, without the tokens beyond the logits."""
    llguidance.numpy.fill_next_token_bitmask(matcher, bitmask)
    words, bits = divmod(vocab_size, 32)
    if bits:
        bitmask[0, words] &= np.uint32((1 << bits) - 1).view(np.int32)
        words += 1
    bitmask[0, words:] = 0
