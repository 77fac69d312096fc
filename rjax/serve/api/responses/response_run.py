"""A response in progress: one that streams, one that does not, one in the background."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import Response

from rjax.outputs import RequestOutput
from rjax.serve.api.chat import ChatRun
from rjax.serve.api.responses.encoder import ResponseBuilder, ResponseEncoder
from rjax.serve.api.responses.events import models_json
from rjax.serve.api.responses.record import ResponseRecord
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.api.service import Service
from rjax.serve.http.chunked_json import ChunkedJSONResponse, response_size, split_bytes
from rjax.serve.protocol.responses_api_models import ResponsesResponse
from rjax.serve.stores.event_log import LoggedEvents
from rjax.serve.stores.response_store import RunningResponse

_log = logging.getLogger("rjax.serve")


@dataclasses.dataclass(frozen=True)
class ResponseRun:
    """A response in progress.

    Attributes:
        response: the response, without output.
        started: JSON of the response without output.
        run: the chat run that generates it.
        record: the response's record.
        tenant: name of the client's tenant.
        service: the app's service.
    """

    response: ResponsesResponse
    started: str
    run: ChatRun
    record: ResponseRecord
    tenant: str
    service: Service

    async def whole(self, request: Request) -> Response:
        """The response of a request that does not stream.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError: see `ChatRun.final`.
        """
        output = await self.run.final(request)
        return _json_response(await self._complete(self._builder(), output))

    async def stream(self) -> Response:
        """Submit the prompt and stream the response.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError: see `ChatRun.stream`.
        """
        return await self.run.stream(self._encoder())

    async def start_in_background(self) -> Response:
        """Submit the prompt, store the response as one in progress, and go on with it in a task.

        Returns:
            The queued response, or its events.

        Raises:
            ApiError: 400, it cannot be stored.
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError: see `ChatRun.start`.
        """
        record, large = self.record, self.record.is_large
        kept = await self._work(functools.partial(record.begin, self.started), large=large)
        if record.log is None:
            queued = self.response.model_copy(update={"status": "queued"})
            data = await self._work(lambda: models_json(queued, large=large), large=large)
            builder, close = self._builder(), self.run.close
            await self.run.start()
            work, answer = self._go_on(builder), _json_response(data)
        else:
            encoder = self._encoder()
            events = await self.run.stream(encoder)
            builder, close = encoder.builder, events.close
            work, answer = events.write_to(record.log), LoggedEvents(record.log, 0)
        task = asyncio.ensure_future(work)
        self.service.background.add(task)
        task.add_done_callback(functools.partial(self._stopped, close))
        running = RunningResponse(task.cancel, functools.partial(self._cancel, task, builder))
        self.service.responses.add(self.tenant, dataclasses.replace(kept, running=running))
        return answer

    def _builder(self) -> ResponseBuilder:
        """The builder of a response that does not stream."""
        return ResponseBuilder(ResponseWriter(self.response), self.run.parts, self.record)

    def _encoder(self) -> ResponseEncoder:
        return ResponseEncoder(self.response, self.started, self.run.parts, self.record)

    async def _complete(self, builder: ResponseBuilder, output: RequestOutput) -> str:
        """Complete and store the response of an output; returns its JSON."""
        large = builder.is_large(response_size([output], self.run.params))
        add = functools.partial(builder.add, output, last=True)
        data = await self._work(add, large=large)
        assert data is not None
        self.record.store()
        return data

    async def _go_on(self, builder: ResponseBuilder) -> None:
        """Generate and store the response."""
        try:
            await self._complete(builder, await self.run.output())
        except Exception as error:
            fail = functools.partial(builder.fail, error)
            await self._work(fail, large=builder.is_large())
            self.record.store()

    def _stopped(self, close: Callable[[], object], task: "asyncio.Task[None]") -> None:
        """Release what the task used; it may not have begun."""
        self.service.background.discard(task)
        close()
        if self.record.log is not None:
            self.record.log.end()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a response in the background failed", exc_info=task.exception())

    async def _cancel(self, task: "asyncio.Task[None]", builder: ResponseBuilder) -> None:
        """Stop the task, and store the response with its output so far."""
        task.cancel()
        await asyncio.wait({task})
        await self.service.response_threads.run(builder.cancel)
        self.record.store()

    async def _work[T](self, function: Callable[[], T], *, large: bool) -> T:
        return await self.service.response_threads.run(function) if large else function()


def _json_response(data: str) -> ChunkedJSONResponse:
    return ChunkedJSONResponse(split_bytes(data.encode()))
