"""The routes."""

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

import rjax
from rjax.errors import InvalidConfigError
from rjax.serve import information, pooling, prefixes
from rjax.serve.answers import (
    ChatAnswer,
    CompletionAnswer,
    ModelCard,
    ModelList,
    ModelPermission,
    PrefixCard,
    PrefixList,
    Text,
    Tokens,
)
from rjax.serve.bodies import body_of
from rjax.serve.chat import chat
from rjax.serve.completions import complete
from rjax.serve.errors import ApiError, install_handlers
from rjax.serve.intake import Intake
from rjax.serve.openapi import takes
from rjax.serve.pieces import pieced
from rjax.serve.prompts import encode, layout_options, message_tokens
from rjax.serve.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    PinBody,
    PrefixBody,
    TokenizeBody,
)
from rjax.serve.responses import routes as responses
from rjax.serve.routing import ERRORS, EVENTS, Caller, Served, private_router
from rjax.serve.running import unless_disconnected
from rjax.serve.service import Service

_METRICS_SECONDS = 5.0  # the engine answers between two steps

private = private_router()
_ROUTERS = (information.public, private, responses.router, pooling.router, information.private)


def build_app(service: Service) -> FastAPI:
    """The server's app. Every route but /health and /ping asks for an API key, where there are
    keys."""
    app = FastAPI(
        title="rjax",
        version=rjax.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        servers=[{"url": service.http.root_path}] if service.http.root_path else None,
        redirect_slashes=False,  # the Location would hold whatever the Host header says
    )
    app.state.service = service
    app.state.keys = service.keys
    for router in _ROUTERS:
        app.include_router(router)
    http = service.http
    app.root_path = http.root_path
    install_handlers(app, service.limits.retry_after)
    app.add_middleware(
        Intake,
        limits=service.limits,
        keys=service.keys,
        metrics=service.metrics,
        health_paths=http.health_paths,
    )
    if http.allowed_origins:
        # Outermost: browsers ask for permission without a key, and read refusals by permission.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
        )
    return app


def check_root_path(root_path: str) -> None:
    """Whether every route can be told apart from the path that a proxy puts before it.

    Raises:
        InvalidConfigError: a route begins like that path.
    """
    routes = (route for router in _ROUTERS for route in router.routes)
    for path in (getattr(route, "path", "") for route in routes):
        if root_path and (path + "/").startswith(root_path + "/"):
            raise InvalidConfigError(
                f"--root-path is {root_path!r}, with which the route {path} begins; give the path "
                "before it"
            )


@private.post(
    "/v1/completions",
    response_model=CompletionAnswer,
    responses={**ERRORS, **EVENTS},
    openapi_extra=takes(CompletionBody),
)
async def completions(
    body: Annotated[CompletionBody, Depends(body_of(CompletionBody))],
    request: Request,
    tenant: Caller,
    service: Served,
) -> Response:
    """Complete a text."""
    return await complete(body, request, tenant, service)


@private.post(
    "/v1/chat/completions",
    response_model=ChatAnswer,
    responses={**ERRORS, **EVENTS},
    openapi_extra=takes(ChatBody),
)
async def chat_completions(
    body: Annotated[ChatBody, Depends(body_of(ChatBody))],
    request: Request,
    tenant: Caller,
    service: Served,
) -> Response:
    """Answer a conversation."""
    return await chat(body, request, tenant, service)


@private.get("/v1/models")
async def models(service: Served) -> ModelList:
    """The model that is served."""
    return ModelList(data=[_card(service)])


@private.get("/v1/models/{model:path}")
async def model(model: str, service: Served) -> ModelCard:
    """The served model by its name."""
    service.check_model(model)
    return _card(service)


@private.post("/tokenize", response_model=Tokens, openapi_extra=takes(TokenizeBody))
async def tokenize(
    body: Annotated[TokenizeBody, Depends(body_of(TokenizeBody))], tenant: Caller, service: Served
) -> Response:
    """Token ids of a text or of laid out messages."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them")
    most = max(service.max_model_len, service.limits.token_ids)
    # lm-eval's remote tokenizer sends messages as the prompt.
    messages = body.prompt if isinstance(body.prompt, list) else body.messages
    if messages is not None:
        tokens = await message_tokens(
            messages,
            body.tools or [],
            layout_options(body, service),
            tenant,
            service,
            add_special_tokens=bool(body.add_special_tokens),
            most=most,
        )
    else:
        assert isinstance(body.prompt, str)
        special = body.add_special_tokens is not False
        (tokens,) = await encode(
            [body.prompt], tenant, service, "prompt", add_special_tokens=special, most=most
        )

    def answer() -> Tokens:
        text = service.tokenizer.token_text
        return Tokens(
            tokens=tokens,
            count=len(tokens),
            max_model_len=service.max_model_len,
            token_strs=[text(token) for token in tokens] if body.return_token_strs else None,
        )

    return await pieced(answer, len(tokens), service.answer_threads)


@private.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(body_of(DetokenizeBody))], service: Served
) -> Text:
    """Text of token ids."""
    service.check_model(body.model)
    if len(body.tokens) > service.max_model_len:
        raise ApiError(
            400,
            f"{len(body.tokens)} tokens; give at most {service.max_model_len}",
            param="tokens",
        )
    for token in body.tokens:
        if not 0 <= token < service.tokenizer.vocab_size:
            shown = token if abs(token) < 2**63 else "too large a number"
            raise ApiError(
                400,
                f"token {shown} is none of the vocabulary's 0 to "
                f"{service.tokenizer.vocab_size - 1}",
                param="tokens",
            )
    text = await service.threads.run(
        lambda: service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return Text(prompt=text)


@private.post("/v1/prefixes", openapi_extra=takes(PrefixBody))
async def register_prefix(
    body: Annotated[PrefixBody, Depends(body_of(PrefixBody))],
    request: Request,
    tenant: Caller,
    service: Served,
) -> PrefixCard:
    """Compute a beginning that prompts will share, and keep it under a name."""
    return await unless_disconnected(request, prefixes.register(body, tenant, service))


@private.get("/v1/prefixes")
async def list_prefixes(tenant: Caller, service: Served) -> PrefixList:
    """The caller's named prefixes."""
    return prefixes.listing(tenant, service)


@private.get("/v1/prefixes/{name}")
async def find_prefix(name: str, tenant: Caller, service: Served) -> PrefixCard:
    """One named prefix."""
    return prefixes.find(name, tenant, service).card()


@private.patch("/v1/prefixes/{name}", openapi_extra=takes(PinBody))
async def pin_prefix(
    name: str,
    body: Annotated[PinBody, Depends(body_of(PinBody))],
    request: Request,
    tenant: Caller,
    service: Served,
) -> PrefixCard:
    """Pin a named prefix, or let the memory go when something else needs it."""
    return await unless_disconnected(request, prefixes.pin(name, body.pin, tenant, service))


@private.delete("/v1/prefixes/{name}")
async def drop_prefix(name: str, tenant: Caller, service: Served) -> PrefixCard:
    """Forget a named prefix."""
    return await prefixes.drop(name, tenant, service)


@private.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: Served) -> Response:
    """Prometheus metrics."""
    try:
        async with asyncio.timeout(_METRICS_SECONDS):
            stats = await service.engine.call(lambda engine: engine.stats())
    except TimeoutError as error:
        raise ApiError(503, "the engine is busy with one step (compiling?)") from error
    return Response(
        service.metrics.exposition(stats),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model,
        created=service.created,
        root=service.root,
        max_model_len=service.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{service.created:x}", created=service.created)],
    )
