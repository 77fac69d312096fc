"""Error responses in the format of OpenAI's API."""

import json
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from rjax.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    InvalidWeightsError,
    OutOfMemoryError,
    OverloadedError,
)

_log = logging.getLogger("rjax.serve")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_MAX_MESSAGE = 1000  # characters; a message may quote the client's input


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status code.
        message: text for the client, which says what was found, what is allowed and what to do.
        code: machine-readable error code.
        param: the request field that caused the error.
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
    short = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
    # JSON input may contain unpaired surrogates, which UTF-8 cannot encode.
    shown = short.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": shown, "type": kind, "code": code or kind, "param": param}}


def as_api_error(error: Exception) -> ApiError:
    """The error response for an exception. Messages of unexpected exceptions are only logged,
    because they may contain paths, addresses or values of other requests."""
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return ApiError(400, str(error), code=CONTEXT_LENGTH_EXCEEDED)
        case InvalidWeightsError():
            return ApiError(400, str(error), code="invalid_weights")
        case InvalidRequestError():
            return ApiError(400, str(error))
        case OverloadedError():
            return ApiError(503, str(error), code="overloaded")
        case OutOfMemoryError():
            return ApiError(409, str(error), code="out_of_memory")
        case EngineDeadError():
            return ApiError(503, "the engine has stopped", code="engine_dead")
        case EngineSleepingError():
            return ApiError(503, str(error), code="engine_sleeping")
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def stream_error(error: Exception) -> str:
    """The JSON of the last event of a stream that failed."""
    found = as_api_error(error)
    return json.dumps(error_body(found.status, found.message, found.code, found.param))


def error_response(error: ApiError, retry_after: int) -> JSONResponse:
    """The HTTP response; a 503 has a ``Retry-After`` header."""
    headers = {}
    if error.status == 503:
        headers["Retry-After"] = str(retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(error.status, error.message, error.code, error.param)
    return JSONResponse(body, error.status, headers)


def install_handlers(
    app: FastAPI, retry_after: int, refused: Callable[[Scope, ApiError], None]
) -> Callable[[Request, Exception], JSONResponse]:
    """Install exception handlers that return this format for every error of the app.

    Args:
        app: the app.
        retry_after: ``Retry-After`` of a 503, in seconds.
        refused: called with every error response.

    Returns:
        The response of an exception that no handler of the app sees.
    """

    def respond(request: Request, error: Exception) -> JSONResponse:
        found = as_api_error(error)
        refused(request.scope, found)
        return error_response(found, retry_after)

    def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, str(error.detail))
        refused(request.scope, found)
        response = error_response(found, retry_after)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(HTTPException, http)
    for kind in (
        ApiError,
        InvalidRequestError,
        InvalidWeightsError,
        OverloadedError,
        OutOfMemoryError,
        EngineDeadError,
        EngineSleepingError,
        Exception,
    ):
        app.add_exception_handler(kind, respond)
    return respond
