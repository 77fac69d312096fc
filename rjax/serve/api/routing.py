"""Dependencies, error responses and router that all routes share."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from rjax.serve.api.service import Service, get_service
from rjax.serve.http.auth import Tenant, authenticate, authenticate_operator
from rjax.serve.protocol.responses import ErrorResponse

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in (
        (400, "the request cannot be served as it is"),
        (401, "no valid API key"),
        (404, "unknown model or name"),
        (409, "a limit on stored objects is reached, or the KV pool is full"),
        (408, "the body did not arrive in time"),
        (413, "the body is too large"),
        (431, "the headers are too large"),
        (500, "the server failed"),
        (503, "overloaded, shutting down or dead"),
    )
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the response, or if stream is set a stream of events with one chunk each",
        "content": {
            "text/event-stream": {
                "schema": {  # of one event
                    "type": "object",
                    "properties": {"data": {"type": "string"}},
                    "required": ["data"],
                }
            }
        },
    }
}

TenantDep = Annotated[Tenant, Depends(authenticate)]
ServiceDep = Annotated[Service, Depends(get_service)]


def private_router() -> APIRouter:
    """A router whose routes require an API key if the server has keys."""
    return APIRouter(dependencies=[Depends(authenticate)], responses=ERRORS)


def operator_router() -> APIRouter:
    """A router whose routes require an operator's key if the server has keys; it is part of the app
    with ``ServeConfig.enable_weight_updates`` only."""
    refused = {403: {"model": ErrorResponse, "description": "the key is not an operator's"}}
    return APIRouter(dependencies=[Depends(authenticate_operator)], responses=ERRORS | refused)
