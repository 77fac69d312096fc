"""Answers Responses requests by running a chat."""

import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import QueryParams

from rjax.serve.auth import Tenant
from rjax.serve.chat import ChatRun, prepare_chat
from rjax.serve.chunked_json import (
    ChunkedJSONResponse,
    is_large,
    iter_json,
    response_size,
    split_bytes,
)
from rjax.serve.errors import ApiError, as_api_error
from rjax.serve.event_stream import EventStream, NamedEvent
from rjax.serve.requests import FunctionCall, Message, ToolCall
from rjax.serve.responses import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FinishReason,
    ResponseToolCall,
    UsageInfo,
)
from rjax.serve.responses_api.conversion import chat_body, check_fields, input_messages, renamed
from rjax.serve.responses_api.input_items import page, stored_items
from rjax.serve.responses_api.requests import NamedFunctionTool, ResponsesRequest
from rjax.serve.responses_api.responses import (
    ResponseFunctionToolCall,
    ResponseReasoningItem,
    ResponsesResponse,
)
from rjax.serve.responses_api.store import StoredResponse
from rjax.serve.responses_api.writer import ResponseWriter
from rjax.serve.service import Service

_LARGE_ECHO = 64 * 2**10  # characters repeated from the request; more are written on a thread
_MANY_ITEMS = 128  # of an input; more are written on a thread
_EXTRA_ECHO = 256 * 2**10  # characters outside the prompt, such as a schema and metadata
_MESSAGES = TypeAdapter(list[Message])


async def respond(
    body: ResponsesRequest, request: Request, tenant: Tenant, service: Service
) -> Response:
    """Answer a Responses request."""
    check_fields(body, service.limits, reasons=service.output_format.reasons)
    messages = input_messages(body.input)
    if body.previous_response_id is not None:
        param = "previous_response_id"
        before = service.responses.find(tenant.name, body.previous_response_id, param)
        messages = [*_MESSAGES.validate_json(before.conversation), *messages]
    knows_effort = "reasoning_effort" in str(service.tokenizer.hf.chat_template or "")
    try:
        chat = chat_body(body, messages, knows_effort=knows_effort)
        run = await prepare_chat(chat, tenant, service)
    except ApiError as error:
        raise renamed(error) from error
    response = _response(body, run, service)
    echo = await service.response_threads.run(_echo_size, response)
    if echo > service.longest_text + _EXTRA_ECHO:
        raise ApiError(
            400,
            f"the tools, the format and the metadata have {echo} characters, more than a prompt of "
            f"{service.max_model_len} tokens can hold; shorten them",
            param="tools",
        )
    large = echo > _LARGE_ECHO
    response_run = _ResponseRun(
        body, run, ResponseWriter(response), messages, large, tenant, service
    )
    if body.stream:
        await run.start()
        return EventStream(response_run.events(), run.close)
    return await response_run.whole(request)


@dataclasses.dataclass(frozen=True)
class _ResponseRun:
    """A response in progress.

    Attributes:
        body: of the request.
        run: the chat run that generates it.
        writer: of the response.
        messages: of the conversation before the response.
        large_echo: whether the fields repeated from the request are large.
        tenant: of the client.
        service: of the app.
    """

    body: ResponsesRequest
    run: ChatRun
    writer: ResponseWriter
    messages: list[Message]
    large_echo: bool
    tenant: Tenant
    service: Service

    async def whole(self, request: Request) -> Response:
        """The response of a request that does not stream."""
        output = await self.run.final(request)

        def write() -> None:
            answer = self.run.response(output)
            (choice,) = answer.choices
            message = choice.message
            logprobs = [] if choice.logprobs is None else choice.logprobs.content
            self.writer.feed(
                DeltaMessage(reasoning=message.reasoning, content=message.content), logprobs
            )
            for i, call in enumerate(message.tool_calls or ()):
                self.writer.feed(DeltaMessage(tool_calls=[_whole_call(i, call)]))
            self.writer.finish(choice.finish_reason, answer.usage)

        large = is_large(response_size([output], self.run.params))
        await self._work(write, large=large)
        large = large or self.large_echo
        return ChunkedJSONResponse(split_bytes(await self._end(large=large)))

    async def events(self) -> AsyncIterator[NamedEvent]:
        """The events of a stream."""
        writer = self.writer
        reason: FinishReason | None = None
        usage: UsageInfo | None = None
        try:
            for event in writer.begin():
                yield NamedEvent(event.type, await self._json(event, large=self.large_echo))
            async for chunk in self.run.chunks():
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    logprobs = () if choice.logprobs is None else choice.logprobs.content
                    for event in writer.feed(choice.delta, logprobs):
                        yield NamedEvent(event.type, event.model_dump_json())
            assert reason is not None
            assert usage is not None
            large = self.large_echo or is_large(writer.size)
            last = writer.finish(reason, usage)
            await self._end(large=large)  # store before the client gets the last event
            for event in last:
                yield NamedEvent(event.type, await self._json(event, large=large))
        except Exception as error:
            large = self.large_echo or is_large(writer.size)
            for event in writer.fail(as_api_error(error)):
                yield NamedEvent(event.type, await self._json(event, large=large))

    async def _end(self, *, large: bool) -> bytes:
        """The JSON of the response. Stores the response if requested and if it fits."""
        response, store = self.writer.response, self.service.responses
        response.store = response.store and response.status != "failed"
        data = (await self._json(response, large=large)).encode()
        if response.store:
            given = self.body.input
            many = isinstance(given, list) and len(given) > _MANY_ITEMS
            kept = StoredResponse(
                response.id,
                data,
                _MESSAGES.dump_json([*self.messages, _message(response)], exclude_none=True),
                await self._work(lambda: stored_items(given, response.id), large=large or many),
            )
            if store.has_room(kept.size):
                store.add(self.tenant.name, kept)
            else:
                response.store = False
                data = (await self._json(response, large=large)).encode()
        return data

    async def _json(self, value: BaseModel, *, large: bool) -> str:
        return await self._work(lambda: "".join(iter_json(value)), large=large)

    async def _work[T](self, function: Callable[[], T], *, large: bool) -> T:
        return await self.service.response_threads.run(function) if large else function()


def _whole_call(index: int, call: ResponseToolCall) -> DeltaToolCall:
    function = DeltaFunctionCall(name=call.function.name, arguments=call.function.arguments)
    return DeltaToolCall(index=index, id=call.id, function=function)


def stored(name: str, tenant: Tenant, service: Service) -> Response:
    """A stored response.

    Raises:
        ApiError: 404.
    """
    return ChunkedJSONResponse(split_bytes(service.responses.find(tenant.name, name).response))


def stored_input(name: str, query: QueryParams, tenant: Tenant, service: Service) -> Response:
    """A page of a stored response's input items.

    Raises:
        ApiError: 400, 404.
    """
    items = service.responses.find(tenant.name, name).items
    return ChunkedJSONResponse(split_bytes(page(items, query)))


def _echo_size(response: ResponsesResponse) -> int:
    """Characters of a response without output, most of which repeat the request.

    Raises:
        ApiError: 400, the response cannot be serialised.
    """
    try:
        return sum(map(len, iter_json(response)))
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
        id=f"resp_{service.replica_tag}{secrets.token_hex(16)}",
        created_at=int(time.time()),
        status="in_progress",
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


def _message(response: ResponsesResponse) -> Message:
    """The output of a response as an assistant message."""
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for item in response.output:
        if isinstance(item, ResponseFunctionToolCall):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        else:
            into = reasoning if isinstance(item, ResponseReasoningItem) else texts
            into += [part.text for part in item.content]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(reasoning) or None,
        tool_calls=calls or None,
    )
