"""What all routes have in common: who calls, which service answers, which errors there are."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from rjax.serve.answers import ErrorAnswer
from rjax.serve.auth import Tenant, authenticate
from rjax.serve.service import Service, service_of

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "the request cannot be served as it is"),
        (401, "no valid API key"),
        (404, "no such model or name"),
        (409, "too much is held already"),
        (408, "the body did not arrive in time"),
        (413, "the body is too large"),
        (431, "the headers are too large"),
        (500, "the server failed"),
        (503, "overloaded, shutting down or dead"),
    )
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with stream set a stream of events that each hold a chunk",
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

Caller = Annotated[Tenant, Depends(authenticate)]
Served = Annotated[Service, Depends(service_of)]


def private_router() -> APIRouter:
    """A router whose routes ask for an API key, where there are keys."""
    return APIRouter(dependencies=[Depends(authenticate)], responses=ERRORS)
