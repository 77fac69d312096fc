"""The routes that generate, served without FastAPI's work for each request.

FastAPI resolves dependencies, opens exit stacks and wraps ``send`` for every request, which is a
fifth of the function calls that a stream's admission takes on the event loop (``bench/log``).
`GeneratingRoutes` answers these routes before FastAPI's router sees them; the router has them too,
for the OpenAPI document and the 405 of other methods.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rjax.serve.api.bodies import json_body
from rjax.serve.api.chat import chat
from rjax.serve.api.completions import complete
from rjax.serve.api.openapi import request_body_schema
from rjax.serve.api.responses.respond import respond
from rjax.serve.api.routing import ERRORS, EVENTS
from rjax.serve.api.service import Service, get_service
from rjax.serve.http.auth import Tenant, authenticate
from rjax.serve.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    RequestModel,
    SamplingRequest,
)
from rjax.serve.protocol.responses import ChatCompletionResponse, CompletionResponse
from rjax.serve.protocol.responses_api_models import ResponsesResponse
from rjax.serve.protocol.responses_api_requests import ResponsesRequest


class GeneratingRoute:
    """A POST route that generates.

    Args:
        name: the route's name in the OpenAPI document.
        summary: one sentence that says what the route does.
        answer: coroutine function that answers a request with a parsed body.
        kinds: models of the body, by the field that tells them apart if there are several.
        response: model of the response to a request that does not stream.
    """

    def __init__(
        self,
        name: str,
        summary: str,
        answer: Callable[[Any, Request, Tenant, Service], Awaitable[Response]],
        kinds: type[RequestModel] | Mapping[str, type[RequestModel]],
        response: Any,
    ) -> None:
        self._name = name
        self._summary = summary
        self._answer = answer
        self._body = json_body(kinds)
        self._kinds = (kinds,) if isinstance(kinds, type) else tuple(kinds.values())
        self._response = response

    async def __call__(self, request: Request) -> Response:
        """Answer a request.

        Raises:
            ApiError: no valid API key, or the request cannot be served as it is.
            InvalidRequestError, OverloadedError, OutOfMemoryError, EngineDeadError: raised by
                the engine.
        """
        tenant = await authenticate(request)
        service = await get_service(request)
        return await self._answer(await self._body(request), request, tenant, service)

    def document(self, router: APIRouter, path: str) -> None:
        """Add the route to a FastAPI router."""

        async def endpoint(request: Request) -> Response:
            return await self(request)

        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=self._name,
            description=self._summary,
            response_model=self._response,
            responses={**ERRORS, **EVENTS},
            openapi_extra=request_body_schema(*self._kinds),
        )


async def _complete_or_chat(
    body: SamplingRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    if isinstance(body, ChatCompletionRequest):
        return await chat(body, request, tenant, service)
    assert isinstance(body, CompletionRequest)
    return await complete(body, request, tenant, service)


GENERATING_ROUTES = {
    "/v1/completions": GeneratingRoute(
        "completions", "Complete a text.", complete, CompletionRequest, CompletionResponse
    ),
    "/v1/chat/completions": GeneratingRoute(
        "chat_completions",
        "Answer a conversation.",
        chat,
        ChatCompletionRequest,
        ChatCompletionResponse,
    ),
    "/v1/responses": GeneratingRoute(
        "create_response",
        "Create a response to input items, optionally continuing a stored response.",
        respond,
        ResponsesRequest,
        ResponsesResponse,
    ),
    "/invocations": GeneratingRoute(  # SageMaker's one route, as vLLM has it
        "invocations",
        "As /v1/chat/completions if the body has messages, as /v1/completions if it has a prompt.",
        _complete_or_chat,
        {"messages": ChatCompletionRequest, "prompt": CompletionRequest},
        ChatCompletionResponse | CompletionResponse,
    ),
}


class GeneratingRoutes:
    """ASGI middleware that answers `GENERATING_ROUTES`, and leaves all other requests to the app.

    Args:
        app: the other routes.
        root_path: path that requests may begin with; see `rjax.serve.config.http_options`.
        refuse: makes the response to a request that failed.
    """

    def __init__(
        self, app: ASGIApp, root_path: str, refuse: Callable[[Request, Exception], Response]
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._routes = {
            root + path: route
            for path, route in GENERATING_ROUTES.items()
            for root in ("", root_path)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await route(request)
        except Exception as error:
            response = self._refuse(request, error)
        await response(scope, receive, send)
