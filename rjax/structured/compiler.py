"""Compiles constraints for an engine in this process and caches the results."""

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.structured.constraint import Constraint
from rjax.tokenization import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from rjax.structured.mask import GrammarMask

_CACHE_SIZE = 128  # compiled constraints


class GrammarCompiler:
    """Creates the masks of constraints; thread-safe.

    It limits neither the time nor the memory of a compilation. The server compiles constraints of
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
        self._start = mask.start_masks
        self._vocab_size = vocab_size
        llt = grammar_tokenizer(tokenizer, vocab_size, sorted(tokenizer.eos_token_ids))
        if llt is None:
            raise InvalidRequestError(NEEDED)
        self._llt = llt
        self._kept: OrderedDict[Constraint, LLMatcher] = OrderedDict()  # matchers in initial state
        self._lock = threading.Lock()

    def masks(self, constraint: Constraint, count: int) -> "list[GrammarMask]":
        """``count`` masks in their initial state.

        Raises:
            InvalidRequestError: the constraint is not valid, or allows no text.
        """
        with self._lock:
            matcher = self._kept.get(constraint)
            if matcher is None:
                try:
                    matcher = self._compile(constraint, self._llt)
                except ValueError as error:
                    raise InvalidRequestError(
                        f"the {constraint.kind} is not valid: {error}"
                    ) from error
            try:
                masks = self._start(matcher, self._llt, self._vocab_size, count, math.inf)
            except ValueError as error:
                raise InvalidRequestError(str(error)) from error
            self._kept[constraint] = matcher
            self._kept.move_to_end(constraint)
            if len(self._kept) > _CACHE_SIZE:
                self._kept.popitem(last=False)
            return masks
