"""Parse and validate request bodies, with bounded work."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from rjax.serve.api.service import Service, get_service
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.protocol.requests import RequestModel
from rjax.serve.protocol.value_count import at_most_values

_SMALL = 32 * 2**10  # bytes; smaller bodies are parsed on the event loop
_FIELD_ERRORS = frozenset(("refused_field", "unknown_field"))
_FIRST = _FIELD_ERRORS | {"media_part"}
# Names that clients of vLLM look for.
_BOUNDS = frozenset(("greater_than_equal", "less_than_equal"))
_NO_PLACE = frozenset(
    (
        "body",
        "str",
        "int",
        "float",
        "bool",
        "NamedTool",
        "NamedFunctionTool",
        "TextPart",
        "input_text",
        "output_text",
    )
)
_PARTS = ("content", "tool_calls", "output", "summary")  # lists of a message or an item


type Kind[B] = type[B] | Mapping[str, type[B]]
"""The model of a body, or the models by the field that tells them apart."""


def json_body[B: RequestModel](
    kind: Kind[B], *, optional: bool = False
) -> Callable[[Request], Awaitable[B]]:
    """A FastAPI dependency that parses the body as JSON of this model.

    The values are counted before the body is parsed. Large bodies are parsed on a thread, one at a
    time. With ``optional``, an empty body is an empty object.

    Raises:
        ApiError: 400.
    """

    async def read(request: Request) -> B:
        if not optional:
            _check_content_type(request.headers.get("content-type", ""))
        service = await get_service(request)
        # Request.body() would keep a copy of the bytes until the response is complete.
        data = b"".join([part async for part in request.stream()])
        if optional:
            data = data or b"{}"
        if len(data) <= _SMALL:
            return parse_body(data, kind, service.limits, service.unknown_fields)
        return await _parse_large(data, kind, service)

    return read


def parse_body[B: RequestModel](
    data: bytes, kind: Kind[B], limits: ServeLimits, unknown: UnknownFields
) -> B:
    """Parse and validate a body; unknown fields are logged.

    Raises:
        ApiError: 400, too many values, invalid JSON, or fields that do not fit the model.
    """
    most = limits.body_values
    if not at_most_values(data, most):
        raise ApiError(
            400,
            f"the body holds more than {most} JSON values; give long prompts as text, or several "
            "requests",
            code="too_many_values",
        )
    try:
        found = from_json(data, allow_inf_nan=True, cache_strings=False)
    except ValueError as error:
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from error
    _check_lengths(found, limits)
    return as_model(found, kind if isinstance(kind, type) else _by_field(kind, found), unknown)


def as_model[B: RequestModel](found: dict[str, Any], model: type[B], unknown: UnknownFields) -> B:
    """Validate the fields of a body; unknown fields are logged.

    Raises:
        ApiError: 400, they do not fit the model.
    """
    check = unknown.check()
    try:
        body = model.model_validate(found, context=check)
    except ValidationError as error:
        raise _as_api_error(error) from None
    unknown.warn(check.ignored)
    return body


def _by_field[B: RequestModel](kinds: Mapping[str, type[B]], found: dict[str, Any]) -> type[B]:
    """The model of the first of these fields that the body has."""
    for name, kind in kinds.items():
        if found.get(name) is not None:
            return kind
    raise ApiError(400, f"the body has none of the fields {', '.join(kinds)}; give one of them")


async def _parse_large[B: RequestModel](data: bytes, kind: Kind[B], service: Service) -> B:
    async with service.large_bodies:
        return await service.threads.run(
            parse_body, data, kind, service.limits, service.unknown_fields
        )


def _check_content_type(header: str) -> None:
    media = header.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(400, "the body is no JSON object sent with Content-Type: application/json")


def _check_lengths(found: Any, limits: ServeLimits) -> None:
    """Check the lengths of lists with costly entries before validating the entries."""
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no JSON object sent with Content-Type: application/json")
    prompt = found.get("prompt")  # token ids have another limit
    of_messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    conversations = ("messages", "input", *(("prompt",) if of_messages else ()))
    for name in (*conversations, "tools"):
        value = found.get(name)
        most = limits.tools if name == "tools" else limits.messages
        if isinstance(value, list) and len(value) > most:
            raise ApiError(400, f"{name} has {len(value)} entries; give at most {most}", param=name)
    for field in conversations:
        messages = found.get(field)
        parts = 0
        for message in messages if isinstance(messages, list) else ():
            for name in _PARTS if isinstance(message, dict) else ():
                value = message.get(name)
                parts += len(value) if isinstance(value, list) else 0
        if parts > limits.parts:
            raise ApiError(
                400,
                f"{field} has {parts} text parts and tool calls; give at most {limits.parts}",
                param=field,
            )


def _as_api_error(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False)
    # The deepest error of a union belongs to the member that the client most likely meant.
    first = max(found, key=lambda e: (e["type"] in _FIRST, len(e["loc"]), e["type"]))
    place = [str(part) for part in first["loc"] if part not in _NO_PLACE and "[" not in str(part)]
    context = first.get("ctx", {})
    if first["type"] in _FIELD_ERRORS:
        place.append(context["name"])
    param = ".".join(place)[:100] or None
    if first["type"] == "media_part":
        message = f"{param} is of the type {first['msg']}: this server takes text only"
        return ApiError(400, message, code="unsupported_parameter", param=param)
    if first["type"] == "refused_field":
        message = f"{param!r} is not supported: {context['advice']}"
        return ApiError(400, message, code="unsupported_parameter", param=param)
    if first["type"] == "unknown_field":
        message = f"{param!r} is not a parameter of this route, or not one that this server knows"
        return ApiError(400, f"{message}; leave it out", code="unknown_parameter", param=param)
    forms = {e["type"] for e in found if e["loc"][:-1] == first["loc"][:-1]}
    number = {"int_type", "float_type"} <= forms or {"int_parsing", "float_parsing"} <= forms
    message = "give a number" if number else first["msg"]
    if first["type"] in _BOUNDS:
        message += f" ({first['type']})"
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)
