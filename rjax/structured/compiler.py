"""Compiles constraints for an engine in this process and caches the results."""

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.structured.constraint import Constraint
from rjax.structured.mask_request import MaskRequest
from rjax.tokenization import Tokenizer

if TYPE_CHECKING:
    from rjax.structured.compiled_grammar import CompiledGrammar
    from rjax.structured.mask import GrammarMask

_CACHE_SIZE = 128  # compiled constraints


class GrammarCompiler:
    """Creates the masks of constraints; thread-safe.

    Requests of one owner share a compiled grammar until it fails; see `CompiledGrammar`. Neither
    the time nor the memory of a compilation is limited here: the server compiles constraints of
    untrusted clients in worker processes that it can kill.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: width of the logits.

    Raises:
        InvalidConfigError: the package llguidance is not installed.
        InvalidRequestError: the tokenizer cannot make grammars.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            from rjax.structured import mask
            from rjax.structured.grammar import NEEDED, compile_grammar, grammar_tokenizer
        except ModuleNotFoundError as error:
            raise InvalidConfigError(
                f"structured_outputs needs the package {error.name}, which is not installed; "
                'run: pip install "rjax[structured]"'
            ) from error
        self._compile = compile_grammar
        self._start, self._mask, self._budget = (
            mask.start_grammar,
            mask.GrammarMask,
            mask.MaskBudget,
        )
        self._vocab_size = vocab_size
        llt = grammar_tokenizer(tokenizer, vocab_size, sorted(tokenizer.eos_token_ids))
        if llt is None:
            raise InvalidRequestError(NEEDED)
        self._llt = llt
        self._lock = threading.Lock()
        self._cache_size, self._cache_bytes = _CACHE_SIZE, math.inf
        # Grammars by owner and constraint, with the bytes that compiling them took.
        self._kept: OrderedDict[tuple[str, Constraint], tuple[CompiledGrammar, int]] = OrderedDict()

    def limit_cache(self, size: int, num_bytes: float) -> None:
        """Cache at most ``size`` compiled constraints, of at most ``num_bytes`` in total."""
        with self._lock:
            self._cache_size, self._cache_bytes = size, num_bytes
            self._evict()

    def masks(self, wanted: MaskRequest, count: int) -> "list[GrammarMask]":
        """``count`` masks in their initial state, with one time budget.

        Raises:
            InvalidRequestError: the constraint is not valid, or allows no text.
        """
        key = wanted.owner, wanted.constraint
        with self._lock:
            grammar, _ = self._kept.get(key, (None, 0))
        if grammar is None or grammar.failed:  # compiled without the lock, beside others
            grammar = self._compiled(wanted.constraint)
        budget = self._budget(wanted.seconds)
        masks = [self._mask(grammar, self._vocab_size, budget) for _ in range(count)]
        with self._lock:
            self._kept[key] = grammar, wanted.num_bytes
            self._kept.move_to_end(key)
            self._evict()
        return masks

    def _compiled(self, constraint: Constraint) -> "CompiledGrammar":
        try:
            matcher = self._compile(constraint, self._llt)
        except ValueError as error:
            raise InvalidRequestError(f"the {constraint.kind} is not valid: {error}") from error
        try:
            return self._start(matcher, self._llt, self._vocab_size)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def _evict(self) -> None:
        while self._kept and (
            len(self._kept) > self._cache_size
            or sum(size for _, size in self._kept.values()) > self._cache_bytes
        ):
            self._kept.popitem(last=False)
