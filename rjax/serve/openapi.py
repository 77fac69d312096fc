"""The OpenAPI schema of the routes."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from rjax.serve.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    PrefixRequest,
    RequestModel,
    TokenizeRequest,
)
from rjax.serve.responses_api.requests import ResponsesRequest

REQUEST_MODELS = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    PrefixRequest,
    PinRequest,
)
_REFERENCE = "#/components/schemas/{model}"


def request_body_schema(kind: type[RequestModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that parses this body itself."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


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
    schemas |= bodies["$defs"]
    return found
