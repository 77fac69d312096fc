"""The routes of the server that TRL had before it used vLLM's.

A client announces one tensor at a time, and the routes answer before it has come. No route says
that an update ends: the one after the last tensor does, which drops the prefix cache or generates.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response

from rjax.serve.api.bodies import json_body
from rjax.serve.api.openapi import request_body_schema
from rjax.serve.api.routing import ServiceDep, TenantDep, operator_router
from rjax.serve.api.service import Service
from rjax.serve.api.trainers.token_ids import generate_as_older
from rjax.serve.api.trainers.weight_link import TensorSpec
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses import HealthResponse
from rjax.serve.protocol.trainer_requests import (
    OlderGenerateRequest,
    OlderInitRequest,
    OlderUpdateRequest,
)
from rjax.serve.protocol.trainer_responses import (
    MessageResponse,
    OlderGenerateResponse,
    WorldSizeResponse,
)

router = operator_router()
_log = logging.getLogger("rjax.serve")


@router.get("/health/", response_model_exclude_none=True)
async def health() -> HealthResponse:
    """Answer 200 once the server is ready."""
    return HealthResponse(status="ready")


@router.get("/get_world_size/")
async def get_world_size() -> WorldSizeResponse:
    """Number of receivers of weights: one, for any number of devices."""
    return WorldSizeResponse(world_size=1)


@router.post("/init_communicator/", openapi_extra=request_body_schema(OlderInitRequest))
async def init_communicator(
    body: Annotated[OlderInitRequest, Depends(json_body(OlderInitRequest))], service: ServiceDep
) -> MessageResponse:
    """Connect to the trainer, which listens once it has this answer."""
    _later(service, service.weight_updates.connect(body.port))
    return MessageResponse(message="connecting to the trainer")


@router.post("/update_named_param/", openapi_extra=request_body_schema(OlderUpdateRequest))
async def update_named_param(
    body: Annotated[OlderUpdateRequest, Depends(json_body(OlderUpdateRequest))],
    service: ServiceDep,
) -> MessageResponse:
    """Receive one tensor, which the trainer sends once it has this answer."""
    spec = TensorSpec.read(body.name, body.dtype, body.shape)
    updates = service.weight_updates
    if not updates.is_open:
        await asyncio.gather(*service.transfers)
        updates.check_connected()  # else the tensors behind a failed one would be an update
        await updates.start(partial=True)
    _later(service, updates.receive([spec]))
    return MessageResponse(message="receiving the tensor")


@router.post("/reset_prefix_cache/")
async def reset_prefix_cache(service: ServiceDep) -> MessageResponse:
    """Use the received weights, and drop the prefix cache."""
    await _finish(service)
    await service.engine.call_utility("reset_prefix_cache")
    return MessageResponse(message="the prefix cache is empty")


@router.post("/close_communicator/")
async def close_communicator(service: ServiceDep) -> MessageResponse:
    """Close the connection to the trainer."""
    await service.weight_updates.close()
    return MessageResponse(message="the connection is closed")


@router.post(
    "/generate/",
    response_model=OlderGenerateResponse,
    openapi_extra=request_body_schema(OlderGenerateRequest),
)
async def generate(
    body: Annotated[OlderGenerateRequest, Depends(json_body(OlderGenerateRequest))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> Response:
    """Use the received weights, and complete texts by token ids."""
    await _finish(service)
    return await generate_as_older(body, request, tenant, service)


def _later(service: Service, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` behind the answer. The trainer learns of an error on its own connection."""

    async def run() -> None:
        try:
            await work
        except (ApiError, ValueError) as error:
            _log.warning("an update of the weights has failed: %s", error)

    task = asyncio.create_task(run())
    service.transfers.add(task)
    task.add_done_callback(service.transfers.discard)


async def _finish(service: Service) -> None:
    """Wait for the announced tensors, and use them if all have come."""
    await asyncio.gather(*service.transfers)
    if service.weight_updates.is_open:
        await service.weight_updates.finish("keep")
