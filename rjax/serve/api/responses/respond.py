"""Answers Responses requests by running a chat."""

import secrets
import time

from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from rjax.serve.api.chat import ChatRun, prepare_chat
from rjax.serve.api.responses.conversion import chat_body, check_fields, input_messages, renamed
from rjax.serve.api.responses.record import MESSAGES, ResponseRecord
from rjax.serve.api.responses.response_run import ResponseRun
from rjax.serve.api.service import Service
from rjax.serve.http.auth import Tenant
from rjax.serve.http.chunked_json import ChunkedJSONResponse, iter_json, split_bytes
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses_api_models import ResponsesResponse
from rjax.serve.protocol.responses_api_requests import NamedFunctionTool, ResponsesRequest
from rjax.serve.stores.event_log import LoggedEvents
from rjax.serve.stores.input_items import page

_LARGE_ECHO = 64 * 2**10  # characters repeated from the request; more are written on a thread
_EXTRA_ECHO = 256 * 2**10  # characters outside the prompt, such as a schema and metadata
_STREAM_QUERY = ("stream", "starting_after")


async def respond(
    body: ResponsesRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a Responses request."""
    check_fields(body)
    messages = input_messages(body.input)
    if body.previous_response_id is not None:
        param = "previous_response_id"
        before = service.responses.find(tenant.name, body.previous_response_id, param)
        if not before.conversation:
            raise ApiError(
                400,
                f"the response {body.previous_response_id!r} has not ended with an answer, so it "
                "cannot be continued; wait for it, or send the whole conversation as input",
                code="response_not_completed",
                param=param,
            )
        messages = [*MESSAGES.validate_json(before.conversation), *messages]
    knows_effort = "reasoning_effort" in str(service.tokenizer.hf.chat_template or "")
    try:
        chat = chat_body(body, messages, knows_effort=knows_effort)
        run = await prepare_chat(chat, tenant, service, answer_logprobs=True)
    except ApiError as error:
        raise renamed(error) from error
    response = _response(body, run, service)
    started = await service.response_threads.run(_started_json, response)
    if len(started) > service.longest_text + _EXTRA_ECHO:
        raise ApiError(
            400,
            f"the tools, the format and the metadata have {len(started)} characters, more than a "
            f"prompt of {service.max_model_len} tokens can hold; shorten them",
            param="tools",
        )
    large = len(started) > _LARGE_ECHO
    record = ResponseRecord(body, response, messages, large, tenant.name, service.responses)
    response_run = ResponseRun(response, started, run, record, tenant.name, service)
    if body.background:
        return await response_run.start_in_background()
    if body.stream:
        return await response_run.stream()
    return await response_run.whole(request)


def stored(name: str, query: QueryParams, tenant: Tenant, service: Service) -> Response:
    """A stored response, or its events.

    Args:
        name: id of the response.
        query: ``stream`` asks for the events of a stream in the background, ``starting_after`` for
            those after this sequence number.
        tenant: the client's tenant.
        service: the app's service.

    Raises:
        ApiError: 400, 404.
    """
    start = _first_event(query)
    found = service.responses.find(tenant.name, name)
    if start is None:
        return ChunkedJSONResponse(split_bytes(found.response))
    if found.events is None:
        raise ApiError(
            400,
            "only a response that was requested with background and stream can be streamed; leave "
            "out stream",
            param="stream",
        )
    return LoggedEvents(found.events, start)


async def cancelled(name: str, tenant: Tenant, service: Service) -> Response:
    """Cancel a response in the background; one that has ended is returned unchanged.

    Raises:
        ApiError: 400, it is not in the background; 404.
    """
    found = service.responses.find(tenant.name, name)
    if not found.background:
        raise ApiError(
            400,
            "Cannot cancel a synchronous response: only one in the background can be cancelled; to "
            "cancel another one, close the connection of its request",
            code="not_cancellable",
        )
    if found.running is not None:
        await found.running.cancel()
    return stored(name, QueryParams(), tenant, service)


def _first_event(query: QueryParams) -> int | None:
    """The number of the first event to give; None for the response itself."""
    for name in query:
        if name not in _STREAM_QUERY:
            raise ApiError(
                400,
                f"{name[:100]!r} is not a parameter of this route; it has "
                f"{' and '.join(_STREAM_QUERY)}",
                code="unknown_parameter",
                param=name[:100],
            )
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise ApiError(400, f"stream is {stream[:100]!r}; give true or false", param="stream")
    if after is not None and (stream == "false" or not _is_number(after)):
        raise ApiError(
            400,
            f"starting_after is {after[:100]!r}; give the sequence number of an event, and stream "
            "true",
            param="starting_after",
        )
    if stream == "false":
        return None
    return 0 if after is None else int(after) + 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def stored_input(name: str, query: QueryParams, tenant: Tenant, service: Service) -> Response:
    """A page of a stored response's input items.

    Raises:
        ApiError: 400, 404.
    """
    items = service.responses.find(tenant.name, name).items
    return ChunkedJSONResponse(split_bytes(page(items, query)))


def _started_json(response: ResponsesResponse) -> str:
    """The JSON of a response without output, most of which repeats the request.

    Raises:
        ApiError: 400, the response cannot be serialised.
    """
    try:
        return "".join(iter_json(response))
    except ValueError as error:
        raise ApiError(
            400, "a field holds NaN or an infinite number, which no JSON can say; leave it out"
        ) from error


def _response(body: ResponsesRequest, run: ChatRun, service: Service) -> ResponsesResponse:
    """A new response with status ``in_progress``."""
    choice = body.tool_choice
    text = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        text = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return ResponsesResponse(
        id=f"resp_{service.config.replica_tag}{secrets.token_hex(16)}",
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=service.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=run.params.temperature,
        text={"format": text},
        tool_choice=choice.model_dump()
        if isinstance(choice, NamedFunctionTool)
        else choice or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=run.params.top_p,
        user=body.user,
    )
