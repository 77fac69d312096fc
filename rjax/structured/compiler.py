"""Compiles constraints for an engine in this process and caches the results."""

import time
from typing import TYPE_CHECKING

from rjax.errors import InvalidConfigError, InvalidRequestError, OverloadedError
from rjax.extras import install_command
from rjax.structured.grammar_store import GrammarStore
from rjax.structured.mask_budget import MaskBudget, OwnerBudget
from rjax.structured.mask_request import MaskRequest
from rjax.tokenization import Tokenizer

if TYPE_CHECKING:
    from rjax.structured.compiled_grammar import CompiledGrammar
    from rjax.structured.mask import GrammarMask


class GrammarCompiler:
    """Creates the masks of constraints; thread-safe.

    Grammars are cached for later requests of the same owner; see `CompiledGrammar`. Neither the
    time nor the memory of a compilation is limited here: the server compiles constraints of
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
            from rjax.structured import compiled_grammar, grammar, mask
        except ModuleNotFoundError as error:
            raise InvalidConfigError(
                f"structured_outputs needs the package {error.name}, which is not installed; run: "
                + install_command("structured")
            ) from error
        self._compile, self._first_bitmask = grammar.compile_grammar, mask.first_bitmask
        self._grammar, self._mask = compiled_grammar.CompiledGrammar, mask.GrammarMask
        self._vocab_size = vocab_size
        ends = sorted(tokenizer.eos_token_ids)
        llt = grammar.grammar_tokenizer(tokenizer, vocab_size, ends)
        if llt is None:
            raise InvalidRequestError(grammar.NEEDED)
        self._llt = llt
        self._store: GrammarStore[CompiledGrammar] = GrammarStore()
        self._owners: dict[str, OwnerBudget] = {}

    def limit_cache(
        self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float
    ) -> None:
        """Bound the memory of compiled constraints.

        Args:
            size: most constraints in the cache; those used last are kept.
            num_bytes: most bytes of the constraints in the cache.
            total_bytes: most bytes of those in the cache and in use; beyond it the largest are
                ended.
            idle_seconds: seconds after which an unused constraint leaves the cache.
        """
        self._store.limit(size, num_bytes, total_bytes, idle_seconds)

    def masks(self, wanted: MaskRequest, count: int) -> "list[GrammarMask]":
        """``count`` masks in their initial state, with one time budget.

        Raises:
            InvalidRequestError: the constraint is not valid, or allows no text.
            OverloadedError: the owner's masks took too long lately.
        """
        key = wanted.owner, wanted.constraint
        owner = self._owners.setdefault(wanted.owner, OwnerBudget(wanted.owner_seconds))
        budget = MaskBudget(wanted.seconds, wanted.one_mask_seconds, owner, hash(wanted.constraint))
        if (refusal := budget.refusal()) is not None:
            raise OverloadedError(refusal, "key_mask_seconds")
        grammar = self._store.get(key)
        if grammar is None:  # beside others that compile
            grammar = self._compiled(wanted)
            self._store.add(key, grammar)
        return [self._mask(grammar, self._vocab_size, budget) for _ in range(count)]

    def _compiled(self, wanted: MaskRequest) -> "CompiledGrammar":
        constraint, start = wanted.constraint, time.thread_time()
        try:
            matcher = self._compile(constraint, self._llt)
        except ValueError as error:
            raise InvalidRequestError(f"the {constraint.kind} is not valid: {error}") from error
        try:
            bitmask = self._first_bitmask(matcher, self._llt, self._vocab_size)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return self._grammar(
            matcher,
            bitmask,
            self._store,
            num_bytes=wanted.num_bytes,
            seconds=time.thread_time() - start,
        )
