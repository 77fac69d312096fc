"""Routes that tell about the server: probes, load, versions, the tokenizer, this description."""

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import rjax
from rjax.serve.api.docs_page import docs_page
from rjax.serve.api.openapi import describe
from rjax.serve.api.routing import ServiceDep, private_router
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses import HealthResponse, LoadResponse, VersionResponse
from rjax.tokenization import Tokenizer

_OF_FILES = ("name_or_path", "_file", "_files", "is_local", "local_files_only", "cache_dir")
_ADDED_TOKEN = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
_UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": HealthResponse}}

public = APIRouter()
private = private_router()


@public.get("/health", response_model=HealthResponse, responses=_UNHEALTHY)
async def health(service: ServiceDep) -> JSONResponse:
    """Answer 200 while the engine is alive, accepts requests and worker processes can read them,
    otherwise 503."""
    status = service.health
    answer = HealthResponse(status=status)
    if status == "ready":
        progress = service.engine.channel.compile_progress()
        if progress.compiled < progress.total:
            answer.compiled, answer.of = progress.compiled, progress.total
    return JSONResponse(answer.model_dump(exclude_none=True), 200 if status == "ready" else 503)


@public.get("/ping", response_model=HealthResponse, responses=_UNHEALTHY)
async def ping(service: ServiceDep) -> JSONResponse:
    """Answer as /health does; SageMaker uses this path."""
    return await health(service)


@public.post("/ping", response_model=HealthResponse, responses=_UNHEALTHY)
async def ping_by_post(service: ServiceDep) -> JSONResponse:
    """Answer as /health does."""
    return await health(service)


@private.get("/load")
async def load(service: ServiceDep) -> LoadResponse:
    """Number of prompts in the engine, including waiting ones."""
    return LoadResponse(server_load=service.engine.num_live)


@private.get("/version")
async def version() -> VersionResponse:
    """The version of rjax."""
    return VersionResponse(version=rjax.__version__)


@private.get("/tokenizer_info", response_model=dict[str, Any])
async def tokenizer_info(service: ServiceDep) -> JSONResponse:
    """The tokenizer's configuration and chat template."""
    if not service.config.http.tokenizer_info:
        raise ApiError(
            404,
            "this server does not show its tokenizer and chat template; start it with "
            "--enable-tokenizer-info-endpoint",
            code="disabled",
        )
    return JSONResponse(tokenizer_configuration(service.tokenizer))


@private.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> JSONResponse:
    """The description of the routes."""
    return JSONResponse(describe(request.app))


@private.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The description of the routes as HTML."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    return HTMLResponse(
        docs_page(describe(request.app)), headers={"Content-Security-Policy": policy}
    )


def tokenizer_configuration(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json`` with the chat template in use, without file paths
    of the server."""
    hf = tokenizer.hf
    found = {name: value for name, value in hf.init_kwargs.items() if not name.endswith(_OF_FILES)}
    found["tokenizer_class"] = type(hf).__name__
    found["chat_template"] = hf.chat_template
    found["added_tokens_decoder"] = {
        str(token_id): {name: getattr(token, name) for name in _ADDED_TOKEN}
        for token_id, token in tokenizer.added_tokens.items()
    }
    # Special tokens by name are AddedToken objects, and become their text.
    return json.loads(json.dumps(found, default=str))
