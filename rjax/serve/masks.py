"""Structured output: llguidance grammars as token masks."""

import dataclasses
import json
from collections import OrderedDict
from typing import Any, Literal, NoReturn

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
from jaxtyping import UInt32

from rjax.serve.errors import ApiError
from rjax.serve.limits import ServeLimits
from rjax.serve.text_pool import TextPool
from rjax.tokenization import Tokenizer

# One space after commas and colons and none elsewhere, as json.dumps writes: free white space lets
# a weak model go on with it until its tokens are used up.
_JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match: a JSON schema (as text), a regex, or a grammar (Lark or GBNF)."""

    kind: Literal["json", "regex", "grammar"]
    source: str


class GrammarMask:
    """A `rjax.engine.token_mask.TokenMask` over one llguidance matcher.

    Args:
        matcher: at its start, without an error.
        vocab_size: width of the logits.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self.failure: str | None = None
        """Why the grammar could not go on, if it could not."""
        self._fill()

    @property
    def words(self) -> UInt32[np.ndarray, " W"]:
        """The allowed tokens' bits."""
        return self._words[0].view(np.uint32)

    def accept(self, token_id: int) -> None:
        """Take a sampled token.

        Raises:
            ValueError: the matcher cannot go on.
        """
        if not self._matcher.consume_token(token_id):
            self._fail("the grammar cannot go on")
        self._fill()

    def _fill(self) -> None:
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error() or not self._words.any():
            self._fail("no token fits the grammar")

    def _fail(self, message: str) -> NoReturn:
        self.failure = f"{message}: {_brief(self._matcher.get_error())}"
        raise ValueError(self.failure)


class Grammars:
    """Compiles constraints within limits and keeps the last compiled ones.

    llguidance is written to bound its own work: parsing and every mask have a budget of steps, and
    its regexes are automata without backtracking. A compile that is late all the same is given up
    by its request; its thread ends when the budget does.

    Args:
        tokenizer: of the model; without a fast one every constraint is refused.
        vocab_size: width of the logits.
        limits: of the server.
        pool: threads to compile on.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: ServeLimits, pool: TextPool
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._vocab_size = vocab_size
        self._budget = llguidance.LLParserLimits(
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        self._llt: llguidance.LLTokenizer | None = None
        if tokenizer.is_fast:
            self._llt = llguidance.hf.from_tokenizer(
                tokenizer.hf, n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_token_ids)
            )
        self._kept: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()

    async def masks(self, constraint: Constraint, count: int) -> list[GrammarMask]:
        """``count`` masks at their start.

        Raises:
            ApiError: 400, the constraint is not valid or takes too long.
        """
        matcher = self._kept.get(constraint)
        if matcher is None:
            matcher = await self._pool.run(
                self._compile,
                constraint,
                seconds=self._limits.grammar_seconds,
                task=f"compiling the {constraint.kind}",
            )
            self._kept[constraint] = matcher
        self._kept.move_to_end(constraint)
        while len(self._kept) > self._limits.grammar_cache:
            self._kept.popitem(last=False)
        return await self._pool.run(
            self._start, matcher, count, seconds=self._limits.grammar_seconds, task="a first mask"
        )

    def _start(self, matcher: llguidance.LLMatcher, count: int) -> list[GrammarMask]:
        try:
            return [GrammarMask(matcher.deep_copy(), self._vocab_size) for _ in range(count)]
        except ValueError as error:
            raise ApiError(400, f"the constraint allows no text: {_brief(error)}") from error

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        if self._llt is None:
            raise ApiError(
                400, "structured output needs a fast tokenizer, which this model does not have"
            )
        make = llguidance.LLMatcher
        try:
            match constraint.kind:
                case "json":
                    grammar = make.grammar_from_json_schema(constraint.source, overrides=_JSON_FORM)
                case "regex":
                    grammar = make.grammar_from_regex(constraint.source)
                case "grammar":
                    grammar = llguidance.grammar_from("grammar", constraint.source)
            matcher = make(self._llt, grammar, log_level=0, limits=self._budget)
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(400, f"the {constraint.kind} is not valid: {_brief(error)}") from error
        if matcher.is_error():
            raise ApiError(
                400, f"the {constraint.kind} is not valid: {_brief(matcher.get_error())}"
            )
        return matcher


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
    if _deeper_than(schema, limits.schema_depth):
        raise ApiError(
            400, f"{param} nests deeper than {limits.schema_depth}; flatten it", param=param
        )
    try:
        source = json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise ApiError(400, f"{param} holds a number that is not finite", param=param) from error
    _check_size(source, limits, param)
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


def _brief(error: object) -> str:
    return " ".join(str(error).split())[:300]
