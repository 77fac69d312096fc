"""The routes of vLLM's server that trainers call, such as TRL; see the page on trainers."""

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response

from rjax.serve.api.bodies import json_body
from rjax.serve.api.openapi import request_body_schema
from rjax.serve.api.routing import ServiceDep, TenantDep, operator_router
from rjax.serve.api.trainers.token_ids import generate_token_ids
from rjax.serve.api.trainers.weight_link import check_is_here
from rjax.serve.api.trainers.weight_updates import specs_of
from rjax.serve.protocol.trainer_requests import (
    FinishUpdateRequest,
    InitTransferRequest,
    StartUpdateRequest,
    TokenGenerateRequest,
    UpdateRequest,
)
from rjax.serve.protocol.trainer_responses import (
    MessageResponse,
    ResetResponse,
    TokenGenerateResponse,
    WeightsVersionResponse,
    WorldSizeResponse,
)

router = operator_router()


@router.get("/server_info")
async def get_server_info(service: ServiceDep) -> dict[str, Any]:
    """The settings that a trainer reads, in the form of vLLM's configuration."""
    facts = service.engine.channel.facts
    model = {
        "model": service.config.own_name,
        "dtype": f"torch.{facts.dtype}",
        "max_model_len": facts.max_model_len,
        "max_logprobs": facts.max_logprobs,
        "logprobs_mode": facts.logprobs_mode,
    }
    transfer = {"backend": "shared_memory"}
    return {"vllm_config": {"model_config": model, "weight_transfer_config": transfer}}


@router.get("/get_world_size")
async def get_world_size() -> WorldSizeResponse:
    """Number of receivers of weights: one, for any number of devices."""
    return WorldSizeResponse(world_size=1)


@router.post("/init_weight_transfer_engine", openapi_extra=request_body_schema(InitTransferRequest))
async def init_weight_transfer_engine(
    body: Annotated[InitTransferRequest, Depends(json_body(InitTransferRequest))],
    service: ServiceDep,
) -> MessageResponse:
    """Connect to the trainer, which listens on this machine."""
    if body.init_info.master_address is not None:
        await service.threads.run(check_is_here, body.init_info.master_address)
    await service.weight_updates.connect(body.init_info.master_port)
    return MessageResponse(message="the trainer is connected")


@router.post(
    "/start_weight_update",
    openapi_extra=request_body_schema(StartUpdateRequest, required=False),
)
async def start_weight_update(
    body: Annotated[StartUpdateRequest, Depends(json_body(StartUpdateRequest, optional=True))],
    service: ServiceDep,
) -> MessageResponse:
    """Start an update. The engine serves the old weights until it is finished."""
    await service.weight_updates.start(partial=body.partial, mapping=body.mapping)
    return MessageResponse(message="the update has started")


@router.post("/update_weights", openapi_extra=request_body_schema(UpdateRequest))
async def update_weights(
    body: Annotated[UpdateRequest, Depends(json_body(UpdateRequest))], service: ServiceDep
) -> MessageResponse:
    """Receive the tensors that the body announces from the connected trainer."""
    info = body.update_info
    specs = specs_of(info.tensor_names, info.dtype_names, info.shapes)
    await service.weight_updates.receive(specs)
    return MessageResponse(message=f"received {len(specs)} tensors")


@router.post(
    "/finish_weight_update",
    openapi_extra=request_body_schema(FinishUpdateRequest, required=False),
)
async def finish_weight_update(
    body: Annotated[FinishUpdateRequest, Depends(json_body(FinishUpdateRequest, optional=True))],
    service: ServiceDep,
) -> WeightsVersionResponse:
    """Use the received weights, all of them or none."""
    version = await service.weight_updates.finish(body.mode)
    return WeightsVersionResponse(weights_version=version)


@router.post("/cancel_weight_update")
async def cancel_weight_update(service: ServiceDep) -> MessageResponse:
    """End an update without using its weights."""
    await service.weight_updates.cancel()
    return MessageResponse(message="no update is open")


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceDep) -> ResetResponse:
    """Drop the prefix cache. KV of old weights is never matched, also without this."""
    await service.engine.call_utility("reset_prefix_cache")
    return ResetResponse(success=True)


@router.post(
    "/inference/v1/generate",
    response_model=TokenGenerateResponse,
    openapi_extra=request_body_schema(TokenGenerateRequest),
)
async def generate(
    body: Annotated[TokenGenerateRequest, Depends(json_body(TokenGenerateRequest))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> Response:
    """Complete token ids by token ids."""
    return await generate_token_ids(body, request, tenant, service)
