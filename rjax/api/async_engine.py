"""AsyncLLMEngine: streams the outputs of an engine, on a thread or in a process, to asyncio."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Literal

from rjax.api.lifecycle import AsyncLifecycle
from rjax.api.request_queue import QueueLimits, RequestQueue
from rjax.api.weight_client import WeightClient
from rjax.engine.protocol import Engine
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.engine_loop import STATS_SECONDS
from rjax.engine_channel.output_queue import OutputQueue, OutputSink, join_output
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.errors import EngineDeadError, InvalidRequestError, OverloadedError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

type Health = Literal["ready", "draining", "hung", "dead"]

_MAX_OUTPUTS_A_TURN = 128  # then other callbacks of the event loop run
_STOP_SECONDS = 30.0  # for the engine to end
_log = logging.getLogger(__name__)


class RequestStream:
    """The outputs of one accepted request, in order; the last one has ``finished`` set.

    Leaving the ``async with`` block early aborts the request and frees its pages.
    """

    def __init__(
        self,
        owner: "AsyncLLMEngine",
        request_id: str,
        engine_id: str,
        sequences: int,
        tokens: int,
        tenant: str | None,
        kind: RequestOutputKind,
        sink: OutputSink,
    ) -> None:
        self.request_id = request_id
        self.engine_id = engine_id
        self.sequences = sequences
        self.prompt_tokens = tokens
        self.tenant = tenant
        self.kind = kind
        self.finished = False
        self.sink = sink
        self._owner = owner

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        try:
            assert isinstance(self.sink, OutputQueue), "another sink gets the outputs"
            item = await self.sink.get()
        except Exception:
            self.finished = True
            raise
        self.finished = item.finished
        return item

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the request and abort it if it is unfinished. Closing twice does nothing."""
        self._owner.release(self)


class AsyncLLMEngine:
    """Delivers the outputs of an engine, which runs on a thread or in a process, to asyncio.

    Call all methods except the constructor from the event loop that awaited `start`. Other code
    may access the engine only through `call` and `call_utility`.

    Args:
        engine: an engine, which is then stepped on a thread; or a channel to one.
        limits: limits on unfinished requests.

    Attributes:
        channel: the channel to the engine.
        weights: gives the engine new weights.
        lifecycle: pauses the engine and puts it to sleep.
    """

    def __init__(self, engine: Engine | EngineChannel, limits: QueueLimits | None = None) -> None:
        self.channel = engine if isinstance(engine, EngineChannel) else ThreadChannel(engine)
        self.lifecycle = AsyncLifecycle(self.channel)
        self.limits = limits or QueueLimits()
        self._streams: dict[str, RequestStream] = {}  # by the engine's id of the request
        self._names: dict[str, RequestStream] = {}
        self._undelivered: dict[str, RequestOutput] = {}
        self._is_delivering = False
        self._queue = RequestQueue(self.limits)
        self._ids = itertools.count()
        self._empty = asyncio.Event()
        self._empty.set()
        self._draining = False
        self.weights = WeightClient(self.channel)

    async def start(self) -> None:
        """Start to run requests."""
        await self.channel.start(self._deliver, self._fail)

    @property
    def engine(self) -> Engine:
        """The engine, if it runs in this process.

        Raises:
            RuntimeError: it runs in a process of its own.
        """
        if not isinstance(self.channel, ThreadChannel):
            raise RuntimeError("the engine runs in another process")
        return self.channel.engine

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    @property
    def failed(self) -> bool:
        """Whether the engine stopped on an error, as opposed to `stop`."""
        return self.channel.failed

    @property
    def health(self) -> Health:
        """The engine's state, judged by its last heartbeat."""
        if self.channel.dead:
            return "dead"
        late = time.monotonic() - self.channel.heartbeat > self.limits.heartbeat_seconds
        if late and not self.channel.compile_progress().waiting:
            return "hung"
        return "draining" if self._draining else "ready"

    def check_capacity(self, sequences: int, prompt_tokens: int, tenant: str | None = None) -> None:
        """Check that the queue has capacity for a request of a tenant.

        Raises:
            OverloadedError: the queue or the tenant's share of it is full, or the server is
                shutting down.
            EngineDeadError: the engine is dead or hung.
        """
        if self.health in ("dead", "hung"):
            raise EngineDeadError(
                f"the engine is {self.health}; make a new one, or restart the server"
            )
        if self._draining:
            raise OverloadedError("the server is shutting down; ask another one", "draining")
        self._queue.check(sequences, prompt_tokens, tenant)

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        sink: OutputSink | None = None,
        request_id: str | None = None,
        tenant: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """Add a request to the engine; returns when the engine has accepted it.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample; ``output_kind`` says what the stream's outputs hold.
            sink: where to put the outputs, for a caller that reads several streams together or
                handles each output in the callback that brings it. The caller then sets
                ``finished`` of each stream. None: an `OutputQueue`, which the stream reads.
            request_id: unique among unfinished requests; None generates one.
            tenant: whose share of the queue the request takes; see `QueueLimits`.
            options: see `rjax.engine_channel.channel.EngineChannel.add`.

        Raises:
            InvalidRequestError: the engine refuses the request.
            OverloadedError: see `check_capacity`.
            EngineDeadError: the engine has stopped.
        """
        sequences, tokens = params.num_sequences, len(prompt_token_ids)
        self.check_capacity(sequences, tokens, tenant)
        kind = params.output_kind
        if sink is None:
            sink = OutputQueue(kind, self.limits.unread_tokens)
        name = self._name(request_id)
        # The engine may still have an output of an earlier request with this name.
        engine_id = f"{name}/{next(self._ids)}"
        stream = RequestStream(self, name, engine_id, sequences, tokens, tenant, kind, sink)
        self._streams[engine_id] = self._names[name] = stream
        self._queue.add(sequences, tokens, tenant)
        self._empty.clear()
        try:
            await self.channel.add(engine_id, prompt_token_ids, params, options)
        except BaseException:
            stream.close()
            raise
        return stream

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            made = (f"request-{i}" for i in self._ids)
            return next(name for name in made if name not in self._names)
        if request_id in self._names:
            raise InvalidRequestError(f"request id {request_id!r} is in use; choose another")
        return request_id

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """`submit` and yield every output; closing the generator aborts the request."""
        async with await self.submit(prompt_token_ids, params, **options) as stream:
            async for output in stream:
                yield output

    async def call[T](self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` on the engine's thread between two steps. Its exception is
        raised here and does not stop the engine.

        Raises:
            EngineDeadError: the engine has stopped.
            RuntimeError: the engine runs in a process of its own.
        """
        if not isinstance(self.channel, ThreadChannel):
            raise RuntimeError(
                "the engine runs in another process, which cannot run this function; call its "
                "methods by name with call_utility"
            )
        return await self.channel.run(function)

    async def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of `rjax.engine_channel.channel.UTILITIES` of the engine between two steps. Its
        exception is raised here and does not stop the engine.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        return await self.channel.call_utility(name, *args, **kwargs)

    async def stats(self, seconds: float = STATS_SECONDS) -> Any:
        """The engine's statistics. If the current step takes longer than ``seconds``, they are
        those from before that step.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.call_utility("stats")
        except TimeoutError:
            return self.channel.last_stats

    def release(self, stream: RequestStream) -> None:
        """Drop a stream, and abort its request if it is unfinished."""
        if self._streams.pop(stream.engine_id, None) is None:
            return
        del self._names[stream.request_id]
        self._release_quota(stream)
        if not self._streams:
            self._empty.set()
        if not stream.finished:
            stream.finished = True
            self.channel.abort([stream.engine_id])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; each gets a last output. Unknown ids are ignored."""
        for name in request_ids:
            if (stream := self._names.get(name)) is not None:
                await self.call_utility("abort_request", stream.engine_id)

    def _release_quota(self, stream: RequestStream) -> None:
        """Return a request's share of the queue limits when the engine has finished it."""
        self._queue.remove(stream.sequences, stream.prompt_tokens, stream.tenant)
        stream.sequences = stream.prompt_tokens = 0

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the unfinished ones. Return whether all finished in
        time."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)
        return not self._streams

    async def stop(self) -> None:
        """Abort unfinished requests and end the engine's thread or process."""
        self._draining = True
        self.fail_all(OverloadedError("the server is shutting down", "draining"))
        self.channel.end()
        await asyncio.to_thread(self.channel.join, _STOP_SECONDS)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs to their sinks, `_MAX_OUTPUTS_A_TURN` in one turn of the loop.

        If the loop is late, the outputs of several steps are joined.
        """
        waiting = self._undelivered
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            join_output(waiting, output, stream.kind)
        if not self._is_delivering:
            self._deliver_some()

    def _deliver_some(self) -> None:
        waiting = self._undelivered
        self._is_delivering = bool(waiting)
        if not waiting:
            return
        for _ in range(min(len(waiting), _MAX_OUTPUTS_A_TURN)):
            self._hand_over(waiting.pop(next(iter(waiting))))
        # In the next turn even if none is left, since another step may end in this one.
        asyncio.get_running_loop().call_soon(self._deliver_some)

    def _hand_over(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        output.request_id = stream.request_id
        if output.finished:
            self._release_quota(stream)
        try:
            stream.sink.put(output)
        except OverloadedError as error:
            _log.warning("%s is cut off: %s", output.request_id, error)
            for other in list(self._streams.values()):
                if other.sink is stream.sink:
                    self.release(other)

    def _fail(self) -> None:
        self.fail_all(EngineDeadError("the engine stopped on an error"))

    def fail_all(self, error: Exception) -> None:
        """Raise an error in every reader, after the outputs so far."""
        waiting = self._undelivered
        while waiting:
            self._hand_over(waiting.pop(next(iter(waiting))))
        for stream in list(self._streams.values()):
            stream.sink.fail(error)
