"""The routes of the Responses API."""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response

from rjax.serve.bodies import json_body
from rjax.serve.errors import ApiError
from rjax.serve.openapi import request_body_schema
from rjax.serve.responses_api.input_items import InputItemPage
from rjax.serve.responses_api.requests import ResponsesRequest
from rjax.serve.responses_api.respond import respond, stored, stored_input
from rjax.serve.responses_api.responses import DeletedResponse, ResponsesResponse
from rjax.serve.routing import ERRORS, EVENTS, ServiceDep, TenantDep, private_router

router = private_router()


@router.post(
    "/v1/responses",
    response_model=ResponsesResponse,
    responses={**ERRORS, **EVENTS},
    openapi_extra=request_body_schema(ResponsesRequest),
)
async def create_response(
    body: Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))],
    request: Request,
    tenant: TenantDep,
    service: ServiceDep,
) -> Response:
    """Create a response to input items, optionally continuing a stored response."""
    return await respond(body, request, tenant, service)


@router.get("/v1/responses/{response_id}", response_model=ResponsesResponse)
async def find_response(
    response_id: str, request: Request, tenant: TenantDep, service: ServiceDep
) -> Response:
    """A stored response."""
    for name in request.query_params:
        raise ApiError(
            400,
            f"{name[:100]!r} is not a parameter of this route; a stored response is given whole",
            code="unknown_parameter",
            param=name[:100],
        )
    return stored(response_id, tenant, service)


_QUERY = {
    "parameters": [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in (
            ("after", {"type": "string"}),
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
            ("order", {"enum": ["asc", "desc"], "default": "desc"}),
        )
    ]
}


@router.get(
    "/v1/responses/{response_id}/input_items", response_model=InputItemPage, openapi_extra=_QUERY
)
async def list_input_items(
    response_id: str, request: Request, tenant: TenantDep, service: ServiceDep
) -> Response:
    """The input items of a stored response, newest first by default."""
    return stored_input(response_id, request.query_params, tenant, service)


@router.delete("/v1/responses/{response_id}")
async def drop_response(
    response_id: str, tenant: TenantDep, service: ServiceDep
) -> DeletedResponse:
    """Delete a stored response."""
    service.responses.drop(tenant.name, response_id)
    return DeletedResponse(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponsesResponse)
async def cancel_response(response_id: str, tenant: TenantDep, service: ServiceDep) -> Response:
    """Refused: only background responses can be cancelled, and this server has none."""
    service.responses.find(tenant.name, response_id)
    raise ApiError(
        400,
        "the response has ended; to cancel one that goes on, close the connection of its request",
        code="not_cancellable",
    )
