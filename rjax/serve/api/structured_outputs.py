"""Structured outputs: check constraints against the limits, before the engine compiles them."""

import json
from collections import OrderedDict
from typing import Any, Literal

from rjax.errors import InvalidRequestError
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.errors import ApiError
from rjax.serve.workers.pool import WorkerPool
from rjax.structured.constraint import Constraint, choice_source, json_source
from rjax.structured.grammar import (
    NEEDED,
    grammar_special_tokens,
    grammar_tokenizer,
)
from rjax.structured.mask_request import MaskRequest
from rjax.structured.schemas import generation_schema
from rjax.tokenization import Tokenizer


class GrammarCache:
    """Checks that constraints compile within limits, and remembers those that do.

    A constraint is first compiled in a worker process, which is killed if it takes too long or too
    much memory. The engine compiles only constraints that a worker has compiled within the limits.

    Args:
        tokenizer: the model's tokenizer; if it is not a fast one, every constraint is refused.
        vocab_size: width of the logits.
        limits: the server's limits.
        workers: processes that compile constraints first.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, limits: ServeLimits, workers: WorkerPool
    ) -> None:
        self._limits = limits
        self._workers = workers
        llt = grammar_tokenizer(tokenizer, vocab_size, sorted(tokenizer.eos_token_ids))
        self._supported = llt is not None
        self.special_tokens = grammar_special_tokens(tokenizer, llt, vocab_size)
        self._kept: OrderedDict[Constraint, int] = OrderedDict()  # bytes of the compiled ones

    async def check(self, constraint: Constraint, tenant: str) -> MaskRequest:
        """The request that asks the engine for masks of this constraint.

        Raises:
            InvalidRequestError: the constraint is not valid.
            ApiError: 400, it takes too long or too much memory to compile.
            OverloadedError: too many constraints are being compiled.
        """
        num_bytes = self._kept.get(constraint)
        if num_bytes is None:
            if not self._supported:
                raise InvalidRequestError(NEEDED)
            tried, _ = await self._workers.run(
                {"task": "compile", "kind": constraint.kind, "outer": constraint.outer},
                constraint.source.encode(),
                tenant=tenant,
                what=f"compiling the {constraint.kind}",
            )
            num_bytes = self._kept[constraint] = int(tried["bytes"])
        self._kept.move_to_end(constraint)
        while (
            len(self._kept) > self._limits.grammar_cache
            or sum(self._kept.values()) > self._limits.grammar_cache_bytes
        ):
            self._kept.popitem(last=False)
        limits = self._limits
        return MaskRequest(
            constraint,
            limits.mask_seconds,
            num_bytes,
            tenant,
            limits.one_mask_seconds,
            limits.key_mask_seconds,
        )


def json_constraint(
    schema: Any, limits: ServeLimits, param: str, *, literal: bool = False
) -> Constraint:
    """The constraint of a JSON schema, given as an object or as text.

    Args:
        schema: the request's JSON schema.
        limits: the server's limits.
        param: request field of the schema, for messages.
        literal: do not close objects, as in `generation_schema`.

    Raises:
        ApiError: 400.
    """
    if isinstance(schema, str):
        _check_size(schema, limits, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{param} is not valid JSON", param=param) from error
    check_schema(schema, limits, param)
    return Constraint("json", json_source(generation_schema(schema, literal=literal)))


def check_schema(schema: Any, limits: ServeLimits, param: str) -> None:
    """Check that a JSON schema is an object within the limits.

    Raises:
        ApiError: 400.
    """
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} is no JSON schema object", param=param)
    try:
        source = json_source(schema)
    except ValueError as error:
        raise ApiError(400, f"{param} holds a number that is not finite", param=param) from error
    except RecursionError:
        source = ""  # nested too deeply
    _check_size(source, limits, param)
    if not source or _deeper_than(schema, limits.schema_depth):
        raise ApiError(
            400, f"{param} nests deeper than {limits.schema_depth}; flatten it", param=param
        )


def text_constraint(
    kind: Literal["regex", "grammar"], source: str, limits: ServeLimits, param: str
) -> Constraint:
    """The constraint of a regex or a grammar."""
    if not source:
        raise ApiError(400, f"{param} is empty", param=param)
    _check_size(source, limits, param)
    return Constraint(kind, source)


def choice_constraint(choices: list[str], limits: ServeLimits, param: str) -> Constraint:
    """The constraint that allows one of several texts."""
    if not 1 <= len(choices) <= limits.choices or not all(choices):
        raise ApiError(400, f"{param}: give 1 to {limits.choices} texts, none empty", param=param)
    source = choice_source(choices)
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
