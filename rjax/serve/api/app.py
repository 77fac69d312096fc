"""The FastAPI app and its routes."""

from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

import rjax
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from rjax.serve.api import engine_state, pooling, prefixes, server_info
from rjax.serve.api.bodies import json_body
from rjax.serve.api.generating_routes import GENERATING_ROUTES, GeneratingRoutes
from rjax.serve.api.openapi import request_body_schema
from rjax.serve.api.prompts import encode, layout_options, message_tokens
from rjax.serve.api.responses import routes as responses
from rjax.serve.api.routing import ServiceDep, TenantDep, private_router
from rjax.serve.api.service import Service
from rjax.serve.api.trainers import older_trl
from rjax.serve.api.trainers import routes as trainers
from rjax.serve.http.chunked_json import chunked_response
from rjax.serve.http.disconnect import cancel_on_disconnect
from rjax.serve.http.request_limits import RequestLimitsMiddleware
from rjax.serve.page import routes as page
from rjax.serve.protocol.errors import ApiError, install_handlers
from rjax.serve.protocol.requests import (
    DetokenizeRequest,
    PinRequest,
    PrefixRequest,
    TokenizeRequest,
)
from rjax.serve.protocol.responses import (
    METRICS_TYPE,
    DemoResponse,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    PrefixCard,
    PrefixList,
    TokenizeResponse,
    model_card,
)
from rjax.serve.telemetry.refusal_log import RefusalLog

private = private_router()
ROUTERS = (
    server_info.public,
    page.router,
    responses.router,
    pooling.router,
    private,
    server_info.private,
)
OPERATOR_ROUTERS = (
    engine_state.router,
    trainers.router,
    older_trl.router,
)
for path, route in GENERATING_ROUTES.items():
    route.document(private, path)


def build_app(service: Service) -> FastAPI:
    """The server's app. If the server has API keys, every route but /health, /ping and the page
    requires one. The operators' routes are there with ``enable_weight_updates`` only."""
    app = FastAPI(
        title="rjax",
        version=rjax.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        servers=[{"url": service.config.http.root_path}] if service.config.http.root_path else None,
        redirect_slashes=False,  # the Location header would repeat the client's Host header
    )
    app.state.service = service
    app.state.keys = service.keys
    for router in ROUTERS:
        app.include_router(router)
    if service.config.enable_weight_updates:
        for router in OPERATOR_ROUTERS:
            app.include_router(router)
    http = service.config.http
    app.root_path = http.root_path
    refused = RefusalLog()
    refuse = install_handlers(app, service.limits.retry_after, refused)
    # Innermost: these requests keep their limits and CORS headers.
    app.add_middleware(GeneratingRoutes, root_path=http.root_path, refuse=refuse)
    app.add_middleware(
        RequestLimitsMiddleware,
        limits=service.limits,
        keys=service.keys,
        rejected=service.metrics.rejected,
        health_paths=http.health_paths,
        page_paths=http.page_paths,
        refused=refused,
    )
    if http.allowed_origins:
        # Outermost: preflight requests have no key, and error responses need CORS headers.
        app.add_middleware(CORSMiddleware, **http.cors)
    return app


@private.get("/v1/models")
async def models(service: ServiceDep) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(service, name) for name in service.config.names])


@private.get("/v1/models/{model:path}")
async def model(model: str, service: ServiceDep) -> ModelCard:
    """The served model by its name."""
    service.check_model(model)
    return _card(service, model)


@private.post(
    "/tokenize", response_model=TokenizeResponse, openapi_extra=request_body_schema(TokenizeRequest)
)
async def tokenize(
    body: Annotated[TokenizeRequest, Depends(json_body(TokenizeRequest))],
    tenant: TenantDep,
    service: ServiceDep,
) -> Response:
    """Token ids of a text or of messages."""
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
        special = body.add_special_tokens
        (tokens,) = await encode(
            [body.prompt],
            tenant,
            service,
            "prompt",
            add_special_tokens=special is not False,
            repeat=special is True,
            most=most,
        )

    def answer() -> TokenizeResponse:
        return TokenizeResponse(
            tokens=tokens,
            count=len(tokens),
            max_model_len=service.max_model_len,
            token_strs=service.tokenizer.pieces(tokens) if body.return_token_strs else None,
        )

    return await chunked_response(answer, len(tokens), service.response_threads)


@private.post("/detokenize", openapi_extra=request_body_schema(DetokenizeRequest))
async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(json_body(DetokenizeRequest))], service: ServiceDep
) -> DetokenizeResponse:
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
    return DetokenizeResponse(prompt=text)


@private.post("/v1/prefixes", openapi_extra=request_body_schema(PrefixRequest))
async def register_prefix(
    body: Annotated[PrefixRequest, Depends(json_body(PrefixRequest))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> PrefixCard:
    """Compute the KV of a prefix that prompts share, and register it under a name."""
    return await cancel_on_disconnect(request, prefixes.register(body, tenant, service))


@private.get("/v1/prefixes")
async def list_prefixes(tenant: TenantDep, service: ServiceDep) -> PrefixList:
    """The caller's named prefixes."""
    return prefixes.listing(tenant, service)


@private.get("/v1/prefixes/{name}")
async def find_prefix(name: str, tenant: TenantDep, service: ServiceDep) -> PrefixCard:
    """One named prefix."""
    return prefixes.find(name, tenant, service).card()


@private.patch("/v1/prefixes/{name}", openapi_extra=request_body_schema(PinRequest))
async def pin_prefix(
    name: str,
    body: Annotated[PinRequest, Depends(json_body(PinRequest))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> PrefixCard:
    """Pin or unpin a named prefix."""
    return await cancel_on_disconnect(request, prefixes.pin(name, body.pin, tenant, service))


@private.delete("/v1/prefixes/{name}")
async def drop_prefix(name: str, tenant: TenantDep, service: ServiceDep) -> PrefixCard:
    """Delete a named prefix."""
    return await prefixes.drop(name, tenant, service)


@private.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(service: ServiceDep) -> Response:
    """Prometheus metrics."""
    return Response(
        service.metrics.exposition(await service.engine.stats()), media_type=METRICS_TYPE
    )


@private.get("/page/demo", include_in_schema=False)
async def demo(service: ServiceDep) -> DemoResponse:
    """The page's system prompt and questions for the bundled model; empty for other models."""
    if not service.config.bundled:
        return DemoResponse()
    questions = [question for question, _ in demo_questions()]
    return DemoResponse(system_prompt=demo_system_prompt(), questions=questions)


def _card(service: Service, name: str) -> ModelCard:
    return model_card(name, service.config.own_name, service.created, service.max_model_len)
