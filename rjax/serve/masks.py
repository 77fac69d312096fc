"""Structured output: llguidance grammars as token masks."""

import json
import time
from collections import OrderedDict
from typing import Any, Literal, NoReturn

import llguidance
import llguidance.numpy
import numpy as np
from jaxtyping import UInt32

from rjax.serve.errors import ApiError
from rjax.serve.grammar import Constraint, brief, compile_grammar, grammar_tokenizer
from rjax.serve.limits import ServeLimits
from rjax.serve.threads import WorkThreads
from rjax.serve.workers.pool import WorkerPool
from rjax.tokenization import Tokenizer

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
    """A `rjax.engine.token_mask.TokenMask` over one llguidance matcher.

    Args:
        matcher: at its start, without an error; it becomes this mask's own.
        words: the bits of its first token.
        budget: of the request.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, words: np.ndarray, budget: MaskBudget
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._budget = budget
        self.failure: str | None = None
        """Why the grammar could not go on, if it could not."""

    @property
    def words(self) -> UInt32[np.ndarray, " W"]:
        """The allowed tokens' bits."""
        return self._words[0].view(np.uint32)

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            ValueError: the matcher cannot go on, or takes too long.
        """
        start = time.perf_counter()
        if not self._matcher.consume_token(token_id):
            self._fail("the grammar cannot go on")
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error() or not self._words.any():
            self._fail("no token fits the grammar")
        if not self._budget.spend(time.perf_counter() - start):
            self._fail("the grammar takes too long at each token")

    def _fail(self, message: str) -> NoReturn:
        self.failure = f"{message}: {brief(self._matcher.get_error())}".removesuffix(": ")
        raise ValueError(self.failure)


class Grammars:
    """Compiles constraints within limits and keeps the last compiled ones.

    A constraint is compiled in a worker process first, which is killed when it takes too long or
    too much memory. The server itself compiles only what a worker has compiled within its limits.

    Args:
        tokenizer: of the model; without a fast one every constraint is refused.
        vocab_size: width of the logits.
        limits: of the server.
        workers: to try constraints in.
        threads: to compile on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limits: ServeLimits,
        workers: WorkerPool,
        threads: WorkThreads,
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._threads = threads
        self._num_words = -(-vocab_size // 32)
        self._llt = grammar_tokenizer(tokenizer, vocab_size, sorted(tokenizer.eos_token_ids))
        # Matchers at their start, with the bytes that compiling them took.
        self._kept: OrderedDict[Constraint, tuple[llguidance.LLMatcher, int]] = OrderedDict()

    async def masks(self, constraint: Constraint, count: int, tenant: str) -> list[GrammarMask]:
        """``count`` masks at their start.

        Raises:
            InvalidRequestError: the constraint is not valid.
            ApiError: 400, it takes too long or too much memory.
            OverloadedError: too many are compiled now.
        """
        found = self._kept.get(constraint)
        if found is None:
            tried, _ = await self._workers.run(
                {"task": "compile", "kind": constraint.kind},
                constraint.source.encode(),
                tenant=tenant,
                what=f"compiling the {constraint.kind}",
            )
            assert self._llt is not None, "the worker refuses constraints without it"
            matcher = await self._threads.run(compile_grammar, constraint, self._llt)
            found = self._kept[constraint] = matcher, tried["bytes"]
        self._kept.move_to_end(constraint)
        while (
            len(self._kept) > self._limits.grammar_cache
            or sum(size for _, size in self._kept.values()) > self._limits.grammar_cache_bytes
        ):
            self._kept.popitem(last=False)
        return await self._threads.run(self._start, found[0], count)

    def _start(self, matcher: llguidance.LLMatcher, count: int) -> list[GrammarMask]:
        words = np.zeros((1, self._num_words), np.int32)
        first = matcher.deep_copy()
        llguidance.numpy.fill_next_token_bitmask(first, words)
        budget = MaskBudget(self._limits.mask_seconds)
        return [GrammarMask(first.deep_copy(), words.copy(), budget) for _ in range(count)]


def json_constraint(schema: Any, limits: ServeLimits, param: str) -> Constraint:
    """A JSON schema, given as an object or as text, within its limits.

    Raises:
        ApiError: 400.
    """
    if isinstance(schema, str):
        _check_size(schema, limits, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{param} is not valid JSON", param=param) from error
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} is no JSON schema object", param=param)
    try:
        source = json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"{param} holds a number that is not finite", param=param) from error
    except RecursionError:
        source = ""  # far too deep
    _check_size(source, limits, param)
    if not source or _deeper_than(schema, limits.schema_depth):
        raise ApiError(
            400, f"{param} nests deeper than {limits.schema_depth}; flatten it", param=param
        )
    return Constraint("json", source)


def text_constraint(
    kind: Literal["regex", "grammar"], source: str, limits: ServeLimits, param: str
) -> Constraint:
    """A regex or a grammar within its limits."""
    if not source:
        raise ApiError(400, f"{param} is empty", param=param)
    _check_size(source, limits, param)
    return Constraint(kind, source)


def choice_constraint(choices: list[str], limits: ServeLimits, param: str) -> Constraint:
    """One of several texts."""
    if not 1 <= len(choices) <= limits.choices or not all(choices):
        raise ApiError(400, f"{param}: give 1 to {limits.choices} texts, none empty", param=param)
    source = "start: " + " | ".join(json.dumps(text) for text in choices)
    _check_size(source, limits, param)
    return Constraint("grammar", source)


def _check_size(text: str, limits: ServeLimits, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ApiError(400, f"{param} is not valid Unicode", param=param) from error
    if size > limits.schema_bytes:
        raise ApiError(
            400, f"{param} has {size} bytes; at most {limits.schema_bytes} are read", param=param
        )


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return False
        level = inner
    return any(isinstance(item, dict | list) for item in level)
