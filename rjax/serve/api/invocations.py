"""POST /invocations: SageMaker's one route for chats and completions, as vLLM has it."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response

from rjax.serve.api.bodies import json_body
from rjax.serve.api.chat import chat
from rjax.serve.api.completions import complete
from rjax.serve.api.openapi import request_body_schema
from rjax.serve.api.routing import ERRORS, EVENTS, ServiceDep, TenantDep, private_router
from rjax.serve.protocol.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from rjax.serve.protocol.responses import ChatCompletionResponse, CompletionResponse

router = private_router()
_KINDS: dict[str, type[SamplingRequest]] = {
    "messages": ChatCompletionRequest,
    "prompt": CompletionRequest,
}


@router.post(
    "/invocations",
    response_model=ChatCompletionResponse | CompletionResponse,
    responses={**ERRORS, **EVENTS},
    openapi_extra=request_body_schema(*_KINDS.values()),
)
async def invocations(
    body: Annotated[SamplingRequest, Depends(json_body(_KINDS))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> Response:
    """As /v1/chat/completions if the body has messages, as /v1/completions if it has a prompt."""
    if isinstance(body, ChatCompletionRequest):
        return await chat(body, request, tenant, service)
    assert isinstance(body, CompletionRequest)
    return await complete(body, request, tenant, service)
