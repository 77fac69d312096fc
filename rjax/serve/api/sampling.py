"""Convert request fields to SamplingParams and constraints."""

import dataclasses
import warnings
from typing import Any

from rjax.errors import InvalidRequestError
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.sampling.structured_outputs import EXCLUDED
from rjax.serve.api.structured_outputs import choice_constraint, json_constraint, text_constraint
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from rjax.structured.constraint import Constraint

_PASSED_ON = [
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingRequest.model_fields
    and field.name not in ("max_tokens", "structured_outputs")
]
_COMPLETION_TOKENS = 16  # OpenAI's default


@dataclasses.dataclass(frozen=True, slots=True)
class Alternatives:
    """The alternatives per token that requests may ask for.

    Attributes:
        most: ``max_logprobs`` of the engine.
        vocab_size: width of the logits; None if it is unknown.
    """

    most: int = 20
    vocab_size: int | None = None

    def count(self, name: str, value: int) -> int:
        """The number of alternatives of a request field; -1 asks for the whole vocabulary, as in
        vLLM.

        Raises:
            ApiError: 400.
        """
        if value == -1 and self.vocab_size is not None:
            if self.vocab_size <= self.most:
                return self.vocab_size
            raise ApiError(
                400,
                f"{name} is -1, the whole vocabulary of {self.vocab_size} tokens; at most "
                f"{self.most} are given: ask for fewer, or start the server with --max-logprobs "
                f"{self.vocab_size}",
                param=name,
            )
        return _bounded(name, value, 0, self.most)


DEFAULT_ALTERNATIVES = Alternatives()


def completion_params(
    body: CompletionRequest,
    defaults: dict[str, Any],
    limits: ServeLimits,
    alternatives: Alternatives = DEFAULT_ALTERNATIVES,
) -> SamplingParams:
    """Sampling parameters of a /v1/completions request.

    ``max_tokens`` 0 with ``echo`` scores the prompt: the engine still samples one token, which the
    response omits.
    """
    check_limits(body, limits)
    given = _given(body, alternatives)
    if body.best_of is not None:
        given["best_of"] = _bounded("best_of", body.best_of, 1, limits.n)
    if body.logprobs is not None:
        given["logprobs"] = alternatives.count("logprobs", body.logprobs)
        if body.echo:
            given["prompt_logprobs"] = given["logprobs"]
    if given.get("max_tokens") == 0:
        if not body.echo:
            raise ApiError(400, "max_tokens is 0; give 1 or more, or set echo", param="max_tokens")
        given["max_tokens"] = 1
    return _params({"max_tokens": _COMPLETION_TOKENS, **defaults}, given, body)


def chat_params(
    body: ChatCompletionRequest,
    defaults: dict[str, Any],
    limits: ServeLimits,
    alternatives: Alternatives = DEFAULT_ALTERNATIVES,
) -> SamplingParams:
    """Sampling parameters of a chat request; ``max_tokens`` defaults to what the model's length
    leaves."""
    check_limits(body, limits)
    given = _given(body, alternatives)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs set to true", param="top_logprobs")
    if body.logprobs:
        top = alternatives.count("top_logprobs", body.top_logprobs or 0)
        given["logprobs"] = top
        if body.echo and not body.stream:
            given.setdefault("prompt_logprobs", top)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400,
            "prompt_logprobs are in no stream of this route; leave out one of them",
            param="prompt_logprobs",
        )
    return _params({"max_tokens": None, **defaults}, given, body)


def max_tokens(body: SamplingRequest) -> int | None:
    """The maximum number of tokens to generate, which two request fields can set.

    Raises:
        ApiError: 400, both are set and differ.
    """
    newer = body.max_completion_tokens
    if newer is not None and body.max_tokens not in (None, newer):
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens differ; give one of them",
            param="max_completion_tokens",
        )
    return body.max_tokens if newer is None else newer


def check_limits(body: SamplingRequest, limits: ServeLimits) -> None:
    """Check the server's limits; SamplingParams checks those of the engine.

    Raises:
        ApiError: 400.
    """
    if body.n is not None:
        _bounded("n", body.n, 1, limits.n)
    if body.truncate_prompt_tokens not in (None, -1):
        _bounded("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, 2**31 - 1)
    if body.priority is not None:
        _bounded("priority", body.priority, -(2**31), 2**31 - 1)
    for name, most in (
        ("stop", limits.stop_strings),
        ("bad_words", limits.bad_words),
        ("stop_token_ids", limits.token_ids),
        ("allowed_token_ids", limits.token_ids),
        ("logit_bias", limits.logit_bias),
    ):
        value = getattr(body, name)
        if value is not None and not isinstance(value, str) and len(value) > most:
            raise ApiError(400, f"{name} has {len(value)} entries; give at most {most}", param=name)
    check_salt(body.cache_salt, limits)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream set to true", param="stream_options")


def check_salt(salt: str | None, limits: ServeLimits) -> None:
    """Check the length of a cache salt.

    Raises:
        ApiError: 400.
    """
    if salt is not None and not 1 <= len(salt) <= limits.name_chars:
        raise ApiError(
            400, f"cache_salt: give 1 to {limits.name_chars} characters", param="cache_salt"
        )


def request_constraint(
    body: SamplingRequest, limits: ServeLimits, *, literal: bool
) -> Constraint | None:
    """The constraint of a request's ``response_format`` or ``structured_outputs``, if any.

    Args:
        body: the request's body.
        limits: the server's limits.
        literal: do not close objects of JSON schemas, as in `generation_schema`.

    Raises:
        ApiError: 400; both are set, or one is invalid.
    """
    found: list[Constraint] = []
    if body.response_format is not None:
        found += _of_format(body, limits, literal=literal)
    wanted = body.structured_outputs
    if wanted is not None:
        where = "structured_outputs."
        given = len(wanted.model_fields_set)
        if given != 1:
            raise ApiError(
                400,
                "structured_outputs: give exactly one of json, regex, choice, grammar, json_object",
                param="structured_outputs",
            )
        if wanted.json_schema is not None:
            schema = wanted.json_schema
            found.append(json_constraint(schema, limits, where + "json", literal=literal))
        elif wanted.regex is not None:
            found.append(text_constraint("regex", wanted.regex, limits, where + "regex"))
        elif wanted.choice is not None:
            found.append(choice_constraint(wanted.choice, limits, where + "choice"))
        elif wanted.grammar is not None:
            found.append(text_constraint("grammar", wanted.grammar, limits, where + "grammar"))
        elif wanted.json_object:
            found.append(json_constraint({"type": "object"}, limits, where + "json_object"))
        else:
            raise ApiError(
                400, "structured_outputs: its one entry is null", param="structured_outputs"
            )
    if len(set(found)) > 1:
        raise ApiError(400, "response_format and structured_outputs differ; give one of them")
    return found[0] if found else None


def check_constrained(params: SamplingParams) -> None:
    """Refuse parameters that conflict with a constraint.

    Raises:
        ApiError: 400.
    """
    for name in EXCLUDED:
        if getattr(params, name):
            raise ApiError(
                400, f"{name} contradicts structured output and forced tool calls", param=name
            )


def _of_format(body: SamplingRequest, limits: ServeLimits, *, literal: bool) -> list[Constraint]:
    wanted = body.response_format
    assert wanted is not None
    param = "response_format.json_schema"
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise ApiError(
            400, f"response_format: json_schema goes with the type json_schema, not {wanted.type}",
            param=param,
        )  # fmt: skip
    if wanted.type == "text":
        return []
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        return [json_constraint({"type": "object"}, limits, "response_format")]
    return [json_constraint(wanted.json_schema.schema_, limits, param, literal=literal)]


def _given(body: SamplingRequest, alternatives: Alternatives) -> dict[str, Any]:
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if (most := max_tokens(body)) is not None:
        given["max_tokens"] = most
    if body.prompt_logprobs is not None:
        name = "prompt_logprobs"
        given[name] = alternatives.count(name, body.prompt_logprobs)
    if body.use_beam_search:
        given["temperature"] = 1.0  # without effect, and allows several beams
    return given


def _params(
    defaults: dict[str, Any], given: dict[str, Any], body: SamplingRequest
) -> SamplingParams:
    values = {**defaults, **given}
    if "min_tokens" in given and "max_tokens" not in given and values["max_tokens"] is not None:
        values["max_tokens"] = max(values["max_tokens"], given["min_tokens"])
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    try:
        with warnings.catch_warnings():  # clients could fill the log with temperature warnings
            warnings.simplefilter("ignore")
            return SamplingParams.from_options({**values, "output_kind": kind})
    except InvalidRequestError as error:
        param = str(error).split(" ", 1)[0].split("[", 1)[0]
        raise ApiError(400, str(error), param=param if param in given else None) from error


def _bounded(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        shown = value if abs(value) < 2**63 else "too large a number"
        raise ApiError(
            400, f"{name} is {shown}; give a whole number from {low} to {high}", param=name
        )
    return value
