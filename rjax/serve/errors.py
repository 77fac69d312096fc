"""Every error a client meets, in the shape of OpenAI's API."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rjax.errors import EngineDeadError, InvalidRequestError, OutOfMemoryError, OverloadedError

_log = logging.getLogger("rjax.serve")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
_NO_PLACE = frozenset(("body", "str", "int", "float", "bool", "NamedTool", "TextPart"))
_LONGEST = 1000  # characters of a message; what a client sent may be quoted in it


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: of HTTP.
        message: what was found, what is allowed, how to mend it. Shown to the client.
        code: a word for programs.
        param: the request's field at fault.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    short = message if len(message) <= _LONGEST else message[:_LONGEST] + "..."
    # A lone surrogate that came in by JSON could not go out as UTF-8.
    shown = short.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "code": code or kind, "param": param}}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. Messages of unexpected ones stay in the log: they may
    hold paths, addresses or other requests' values."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return ApiError(400, str(error))
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded")
        case OutOfMemoryError():
            return ApiError(409, str(error), code="out_of_memory")
        case EngineDeadError():
            return ApiError(503, "the engine has stopped", code="engine_dead")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def error_response(error: ApiError, retry_after: int) -> JSONResponse:
    """The response; a 503 says when to try again."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(error.status, error.message, error.code, error.param)
    return JSONResponse(body, error.status, headers)


def install_handlers(app: FastAPI, retry_after: int) -> None:
    """Give every error of the app this shape."""

    def respond(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error), retry_after)

    def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_of_validation(error), retry_after)

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = error_response(ApiError(error.status_code, str(error.detail)), retry_after)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (
        ApiError,
        InvalidRequestError,
        OverloadedError,
        OutOfMemoryError,
        EngineDeadError,
        Exception,
    ):
        app.add_exception_handler(kind, respond)


def _of_validation(error: RequestValidationError) -> ApiError:
    # Of a union's errors the deepest is that of the form which was meant.
    first = max(
        error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"]), e["type"])
    )
    place = [str(part) for part in first["loc"] if part not in _NO_PLACE and "[" not in str(part)]
    param = ".".join(place)[:100] or None
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{param!r} is not a parameter of this route, or not one that this server supports; "
            "leave it out",
            code="unknown_parameter",
            param=param,
        )
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if first["type"] == "model_attributes_type" and param is None:
        return ApiError(400, "the body is no JSON object sent with Content-Type: application/json")
    forms = {e["type"] for e in error.errors() if e["loc"][:-1] == first["loc"][:-1]}
    message = "give a number" if {"int_type", "float_type"} <= forms else first["msg"]
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)
