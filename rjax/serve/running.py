"""One HTTP request's prompts in the engine, and the ways to read their outputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rjax.errors import OverloadedError
from rjax.output_queue import OutputQueue
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.serve.errors import ApiError
from rjax.serve.service import Service
from rjax.structured.constraint import Constraint
from rjax.structured.mask import GrammarMask


class Running:
    """The engine's streams of several prompts with the same parameters, read as one.

    Args:
        service: of the app.
        params: of every prompt.
    """

    def __init__(self, service: Service, params: SamplingParams) -> None:
        self._service = service
        self._params = params
        self._news = OutputQueue(params.output_kind, service.engine.limits.unread_tokens)
        self._streams: dict[str, Any] = {}
        self._generated: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._index: dict[str, int] = {}
        self._masks: list[GrammarMask] = []

    async def start(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        constraint: Constraint | None,
        *,
        tenant: str,
        **options: Any,
    ) -> None:
        """Submit all prompts, or none.

        Args:
            prompts: text, where there is one, and token ids of each.
            constraint: on every sample.
            tenant: name of the one who asks.
            options: of the engine's ``add_request``.

        Raises:
            ApiError, InvalidRequestError, OverloadedError, EngineDeadError.
        """
        service, params = self._service, self._params
        most, samples = service.limits.sequences, params.num_sequences
        count = len(prompts) * samples
        if count > most:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with {samples} samples each are {count} sequences; "
                f"at most {most} fit one request",
                param="n" if params.best_of is None else "best_of",
            )
        try:
            service.engine.check_room(count, sum(len(tokens) for _, tokens in prompts))
            if constraint is not None:
                self._masks = await service.grammars.masks(constraint, count, tenant)
            masks = self._masks
            each = samples if masks else 0

            async def submit(i: int, text: str | None, tokens: list[int]) -> None:
                stream = await service.engine.submit(
                    tokens,
                    params,
                    news=self._news,
                    prompt=text,
                    masks=masks[i * each : (i + 1) * each],
                    **options,
                )
                self._streams[stream.request_id] = stream
                self._index[stream.request_id] = i
                self._generated[stream.request_id] = 0

            found = await asyncio.gather(
                *(submit(i, text, tokens) for i, (text, tokens) in enumerate(prompts)),
                return_exceptions=True,
            )
            for failed in found:
                if failed is not None:
                    raise failed
        except BaseException as error:
            self.close()
            if isinstance(error, OverloadedError):
                service.metrics.rejected(error.reason)
            raise

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Every output with the index of its prompt, as they come, to the end of all.

        Raises:
            ApiError: a sample ended on an error: 400 where its grammar is to blame, otherwise 500.
        """
        open_streams = len(self._streams)
        while open_streams:
            item = await self._news.get()
            name = item.request_id
            if name not in self._streams or self._streams[name].finished:
                continue
            self._count(name, item)
            if item.finished:
                open_streams -= 1
                self._streams[name].finished = True
                self._streams[name].close()
                self._service.metrics.finished(item, self._params, self._generated[name])
            if any(c.finish_reason == "error" for c in item.outputs):
                raise self._failure()
            yield self._index[name], item

    def _count(self, name: str, output: RequestOutput) -> None:
        """Count an output's tokens, and the time since the last one of a stream."""
        now = time.monotonic()
        if name in self._last and self._params.output_kind is RequestOutputKind.DELTA:
            self._service.metrics.streamed(now - self._last[name])
        self._last[name] = now
        self._generated[name] += sum(len(c.token_ids) for c in output.outputs)

    async def finals(self) -> list[RequestOutput]:
        """The last output of each prompt, for requests that want no others."""
        found: dict[int, RequestOutput] = {}
        async for i, output in self.outputs():
            if output.finished:
                found[i] = output
        return [found[i] for i in sorted(found)]

    def _failure(self) -> ApiError:
        for mask in self._masks:
            if mask.failure is not None:
                return ApiError(400, f"{mask.failure}; make it simpler", code="grammar_failed")
        return ApiError(500, "the server failed on this request; its log says why")

    def close(self) -> None:
        """Abort what still runs."""
        for stream in self._streams.values():
            if not stream.finished:
                self._service.metrics.aborted(self._params.n)
            stream.close()


async def unless_disconnected[T](request: Request, work: Awaitable[T]) -> T:
    """The work's result; a client that goes away cancels it.

    Raises:
        ApiError: 499, which nobody reads.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client went away")
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class NamedEvent(NamedTuple):
    """A server-sent event with a name."""

    name: str
    data: str


class EventStream(StreamingResponse):
    """A response of server-sent events that ends their source when the client goes away.

    Args:
        events: data of each event, or its name and data. It handles its own errors: the status is
            sent before it.
        close: called at the end, however it comes; also where ``events`` never began.
    """

    def __init__(
        self, events: AsyncIterator[str] | AsyncIterator[NamedEvent], close: Callable[[], None]
    ) -> None:
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            found = await asyncio.gather(sending, gone, return_exceptions=True)
            self._close()
        if isinstance(found[0], Exception) and not isinstance(found[0], OSError):
            raise found[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            named = isinstance(event, NamedEvent)
            text = f"event: {event.name}\ndata: {event.data}" if named else f"data: {event}"
            body = f"{text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
