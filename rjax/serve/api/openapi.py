"""The OpenAPI schema of the routes."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from rjax.serve.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    PrefixRequest,
    RequestModel,
    TokenizeRequest,
)
from rjax.serve.protocol.responses_api_requests import ResponsesRequest
from rjax.serve.protocol.trainer_requests import TRAINER_REQUESTS

REQUEST_MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    PrefixRequest,
    PinRequest,
    *TRAINER_REQUESTS,
)
_CONVERTED = {
    "integer": ["integer", "boolean", "string"],
    "number": ["number", "boolean", "string"],
    "boolean": ["boolean", "number", "string"],
}
_REFERENCE = "#/components/schemas/{model}"


def request_body_schema(*kinds: type[RequestModel], required: bool = True) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that parses a body of one of these models itself."""
    forms = [{"$ref": _REFERENCE.format(model=kind.__name__)} for kind in kinds]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"content": content, "required": required}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI schema, without FastAPI's 422 responses: invalid bodies get a 400."""
    found = app.openapi()
    for methods in found["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, bodies = models_json_schema(
        [(kind, "validation") for kind in REQUEST_MODELS], ref_template=_REFERENCE
    )
    schemas |= _with_conversions(bodies["$defs"])
    return found


def _with_conversions(schema: Any) -> Any:
    """A JSON schema that also allows the types which pydantic converts to numbers and booleans."""
    match schema:
        case dict():
            found = {key: _with_conversions(value) for key, value in schema.items()}
            if isinstance(kind := found.get("type"), str) and kind in _CONVERTED:
                found["type"] = _CONVERTED[kind]
            return found
        case list():
            return [_with_conversions(value) for value in schema]
    return schema
