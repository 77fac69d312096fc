"""A response in progress: its events or its whole JSON, and what is stored of it."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, TypeAdapter

from rjax.outputs import RequestOutput
from rjax.serve.api.chat import ChatRun
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.api.service import Service
from rjax.serve.http.auth import Tenant
from rjax.serve.http.chunked_json import (
    ChunkedJSONResponse,
    is_large,
    iter_json,
    response_size,
    split_bytes,
)
from rjax.serve.http.event_stream import NamedEvent
from rjax.serve.protocol.errors import ApiError, as_api_error
from rjax.serve.protocol.requests import FunctionCall, Message, ToolCall
from rjax.serve.protocol.responses import ChatFinishReason
from rjax.serve.protocol.responses_api_models import (
    ResponseFunctionToolCall,
    ResponseReasoningItem,
    ResponsesResponse,
)
from rjax.serve.protocol.responses_api_requests import ResponsesRequest
from rjax.serve.stores.event_log import EventLog
from rjax.serve.stores.input_items import InputItem, stored_items
from rjax.serve.stores.response_store import RunningResponse, StoredResponse

MESSAGES = TypeAdapter(list[Message])
"""Parses and dumps the messages of a stored conversation."""

_log = logging.getLogger("rjax.serve")
_MANY_ITEMS = 128  # of an input; more are written on a thread


@dataclasses.dataclass(frozen=True)
class ResponseRun:
    """A response in progress.

    Attributes:
        body: of the request.
        run: the chat run that generates it.
        writer: of the response.
        messages: of the conversation before the response.
        large_echo: whether the fields repeated from the request are large.
        tenant: of the client.
        service: of the app.
        log: of the events of a stream in the background.
    """

    body: ResponsesRequest
    run: ChatRun
    writer: ResponseWriter
    messages: list[Message]
    large_echo: bool
    tenant: Tenant
    service: Service
    log: EventLog = dataclasses.field(default_factory=EventLog)

    async def whole(self, request: Request) -> Response:
        """The response of a request that does not stream."""
        return ChunkedJSONResponse(split_bytes(await self._whole(await self.run.final(request))))

    async def _whole(self, output: RequestOutput) -> bytes:
        """Complete and store the response of an output."""

        def write() -> None:
            reason: ChatFinishReason | None = None
            for delta in self.run.parts.deltas(output):
                self.writer.feed(delta)
                reason = delta.finish_reason or reason
            assert reason is not None
            self.writer.finish(reason, self.run.parts.usage())

        large = is_large(response_size([output], self.run.params))
        await self._work(write, large=large)
        return await self._end(large=large or self.large_echo)

    async def events(self) -> AsyncIterator[NamedEvent]:
        """The events of a stream."""
        writer = self.writer
        reason: ChatFinishReason | None = None
        try:
            for event in writer.begin():
                yield NamedEvent(event.type, await self._json(event, large=self.large_echo))
            async for delta in self.run.deltas():
                reason = delta.finish_reason or reason
                for event in writer.feed(delta):
                    yield NamedEvent(event.type, event.model_dump_json())
            assert reason is not None
            large = self.large_echo or is_large(writer.size)
            last = writer.finish(reason, self.run.parts.usage())
            await self._end(large=large)  # store before the client gets the last event
            for event in last:
                yield NamedEvent(event.type, await self._json(event, large=large))
        except Exception as error:
            large = self.large_echo or is_large(writer.size)
            last = writer.fail(as_api_error(error))
            if self.body.background:
                await self._end(large=large)
            for event in last:
                yield NamedEvent(event.type, await self._json(event, large=large))

    async def start_in_background(self) -> bytes:
        """Submit the prompt, store the response as one in progress, and go on with it in a task.

        Returns:
            The JSON of the queued response.

        Raises:
            ApiError: 400, it cannot be stored.
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError: see `ChatRun.start`.
        """
        service, response = self.service, self.writer.response
        response.status = "queued"
        data = (await self._json(response, large=self.large_echo)).encode()
        response.status = "in_progress"
        now = (await self._json(response, large=self.large_echo)).encode()
        items = await self._items(large=self.large_echo)
        log = self.log if self.body.stream else None
        kept = StoredResponse(response.id, now, b"", items, background=True, events=log)
        if not service.responses.has_room(kept.size):
            raise ApiError(
                400,
                f"a response in the background is stored, and this one has {kept.size} bytes "
                "before any output, more than a key may have; shorten its input or metadata",
                param="background",
            )
        await self.run.start()
        task = asyncio.ensure_future(self._go_on())
        service.background.add(task)
        task.add_done_callback(self._stopped)
        running = RunningResponse(task.cancel, functools.partial(self._cancel, task))
        service.responses.add(self.tenant.name, dataclasses.replace(kept, running=running))
        return data

    async def _go_on(self) -> None:
        """Generate and store the response."""
        if self.body.stream:
            name, store = self.writer.response.id, self.service.responses
            async for event in self.events():
                store.count_events(self.tenant.name, name, self.log.append(event))
            return
        try:
            await self._whole(await self.run.output())
        except Exception as error:
            self.writer.fail(as_api_error(error))
            await self._end(large=self.large_echo)

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        """Release what the task used; it may not have begun."""
        self.service.background.discard(task)
        self.log.end()
        self.run.close()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a response in the background failed", exc_info=task.exception())

    async def _cancel(self, task: "asyncio.Task[None]") -> None:
        """Stop the task, and store how far the response is."""
        task.cancel()
        await asyncio.wait({task})
        if self.writer.response.status == "in_progress":
            self.writer.cancel()
        await self._end(large=self.large_echo or is_large(self.writer.size))

    async def _end(self, *, large: bool) -> bytes:
        """The JSON of the response. Stores the response if requested and if it fits."""
        response, store = self.writer.response, self.service.responses
        if not self.body.background:
            response.store = response.store and response.status != "failed"
        data = (await self._json(response, large=large)).encode()
        if not response.store:
            return data
        ended = response.status in ("completed", "incomplete")
        messages = [*self.messages, _message(response)]
        kept = StoredResponse(
            response.id,
            data,
            MESSAGES.dump_json(messages, exclude_none=True) if ended else b"",
            await self._items(large=large),
            background=bool(self.body.background),
            events=self.log if self.body.background and self.body.stream else None,
        )
        if self.body.background:
            if not store.has_room(kept.size):
                kept = dataclasses.replace(kept, response=self._too_large(), conversation=b"")
            store.replace(self.tenant.name, kept)
        elif store.has_room(kept.size):
            store.add(self.tenant.name, kept)
        else:
            response.store = False
            data = (await self._json(response, large=large)).encode()
        return data

    def _too_large(self) -> bytes:
        """The JSON of a response whose output cannot be stored."""
        error = ApiError(500, "the response is larger than the server stores; stream it instead")
        failed = self.writer.response.model_copy(update={"output": []})
        writer = ResponseWriter(failed)
        writer.fail(error)
        return "".join(iter_json(failed)).encode()

    async def _items(self, *, large: bool) -> tuple[InputItem, ...]:
        given, name = self.body.input, self.writer.response.id
        many = isinstance(given, list) and len(given) > _MANY_ITEMS
        return await self._work(lambda: stored_items(given, name), large=large or many)

    async def _json(self, value: BaseModel, *, large: bool) -> str:
        return await self._work(lambda: "".join(iter_json(value)), large=large)

    async def _work[T](self, function: Callable[[], T], *, large: bool) -> T:
        return await self.service.response_threads.run(function) if large else function()


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
