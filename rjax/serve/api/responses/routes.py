"""The routes of the Responses API."""

from fastapi import Request
from fastapi.responses import Response

from rjax.serve.api.responses.respond import cancelled, stored, stored_input
from rjax.serve.api.routing import EVENTS, ServiceDep, TenantDep, private_router
from rjax.serve.protocol.responses_api_models import DeletedResponse, ResponsesResponse
from rjax.serve.stores.input_items import InputItemPage

router = private_router()


_STREAM_QUERY = {
    "parameters": [
        {"name": name, "in": "query", "schema": schema}
        for name, schema in (
            ("stream", {"type": "boolean", "default": False}),
            ("starting_after", {"type": "integer", "minimum": 0}),
        )
    ]
}


@router.get(
    "/v1/responses/{response_id}",
    response_model=ResponsesResponse,
    responses=EVENTS,
    openapi_extra=_STREAM_QUERY,
)
async def find_response(
    response_id: str, request: Request, tenant: TenantDep, service: ServiceDep
) -> Response:
    """A stored response, or with ``stream`` the events of a stream in the background."""
    return stored(response_id, request.query_params, tenant, service)


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
    """Cancel a response in the background."""
    return await cancelled(response_id, tenant, service)
