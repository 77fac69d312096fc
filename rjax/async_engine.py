"""AsyncLLMEngine: runs an engine on its own thread and streams its outputs to asyncio."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from rjax.engine.protocol import Engine
from rjax.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RjaxError,
    without_frames,
)
from rjax.output_queue import OutputQueue, OutputSink, merge_delta
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

type Health = Literal["ready", "draining", "hung", "dead"]

_IDLE_WAIT = 0.25  # seconds between two heartbeats of an idle engine thread
_STATS_SECONDS = 1.0  # between two records of the statistics, and to wait for newer ones
_MAX_OUTPUTS_A_TURN = 128  # then other callbacks of the event loop run
_MAX_COMMAND_SECONDS = 0.05  # for commands between two steps while requests are unfinished
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on unfinished requests.

    Attributes:
        sequences: maximum of running and waiting sequences; every sample of a request counts.
        prompt_tokens: maximum of their prompt tokens, in total.
        heartbeat_seconds: time without a heartbeat after which the engine thread counts as hung,
            unless its step waits for a program to compile.
        unread_tokens: maximum of unread tokens of one request; every alternative in their logprobs
            counts as a token. Beyond it the request is aborted and its reader gets an
            OverloadedError.
    """

    sequences: int = 1024
    prompt_tokens: int = 4_194_304
    heartbeat_seconds: float = 120.0
    unread_tokens: int = 262_144


class RequestStream:
    """The outputs of one accepted request, in order; the last one has ``finished`` set.

    Leaving the ``async with`` block early aborts the request and frees its pages.
    """

    def __init__(
        self,
        owner: "AsyncLLMEngine",
        request_id: str,
        sequences: int,
        tokens: int,
        kind: RequestOutputKind,
        sink: OutputSink,
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.prompt_tokens = tokens
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
    """Runs an engine's steps on one thread and delivers its outputs to asyncio.

    Call all methods except the constructor from the event loop that awaited `start`. Other code
    may access the engine only through `call`.

    Args:
        engine: the engine to step.
        limits: on unfinished requests.
    """

    def __init__(self, engine: Engine, limits: QueueLimits | None = None) -> None:
        self.engine = engine
        self.limits = limits or QueueLimits()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._undelivered: dict[str, RequestOutput] = {}
        self._is_delivering = False
        self._sequences = 0
        self._prompt_tokens = 0
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="rjax-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._heartbeat = time.monotonic()
        self._last_stats: Any = None
        self._stats_time = -math.inf
        self._draining = False
        self._dead = False
        self._failed = False

    async def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._heartbeat = time.monotonic()
        self._thread.start()

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    @property
    def failed(self) -> bool:
        """Whether the engine stopped on an error, as opposed to `stop`."""
        return self._failed

    @property
    def health(self) -> Health:
        """The engine's state, judged by the thread's last heartbeat."""
        if self._dead or (self._loop is not None and not self._thread.is_alive()):
            return "dead"
        late = time.monotonic() - self._heartbeat > self.limits.heartbeat_seconds
        if late and not self.engine.compile_progress().waiting:
            return "hung"
        return "draining" if self._draining else "ready"

    def check_capacity(self, sequences: int, prompt_tokens: int) -> None:
        """Check that the queue has capacity for a request.

        Raises:
            OverloadedError: the queue is full, or the server is shutting down.
            EngineDeadError: the engine is dead or hung.
        """
        if self.health in ("dead", "hung"):
            raise EngineDeadError(
                f"the engine is {self.health}; make a new one, or restart the server"
            )
        if self._draining:
            raise OverloadedError("the server is shutting down; ask another one", "draining")
        limits = self.limits
        # The messages do not say how full the queue is: that would reveal other tenants' prompt
        # lengths.
        if self._sequences + sequences > limits.sequences:
            raise OverloadedError(
                f"the queue, of at most {limits.sequences} sequences, has no room for the "
                f"{sequences} of this request; try again later",
                "queued_sequences",
            )
        if self._prompt_tokens + prompt_tokens > limits.prompt_tokens:
            raise OverloadedError(
                f"the queue, of at most {limits.prompt_tokens} prompt tokens, has no room for the "
                f"{prompt_tokens} of this request; try again later",
                "queued_tokens",
            )

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        sink: OutputSink | None = None,
        request_id: str | None = None,
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
            options: further arguments of the engine's ``add_request``.

        Raises:
            InvalidRequestError: the engine refuses the request.
            OverloadedError: the queue is full, or the server is shutting down.
            EngineDeadError: the engine has stopped.
        """
        sequences, tokens = params.num_sequences, len(prompt_token_ids)
        self.check_capacity(sequences, tokens)
        kind = params.output_kind
        if sink is None:
            sink = OutputQueue(kind, self.limits.unread_tokens)
        stream = RequestStream(self, self._name(request_id), sequences, tokens, kind, sink)
        self._streams[stream.request_id] = stream
        self._sequences += stream.sequences
        self._prompt_tokens += stream.prompt_tokens
        self._empty.clear()
        try:
            await self.call(
                lambda engine: engine.add_request(
                    stream.request_id, list(prompt_token_ids), params, **options
                )
            )
        except BaseException:
            stream.close()
            raise
        return stream

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            made = (f"request-{i}" for i in self._ids)
            return next(name for name in made if name not in self._streams)
        if request_id in self._streams:
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
        """
        if self._dead or self._loop is None:
            raise EngineDeadError("the engine does not run; make a new one, or restart the server")
        done = self._post(self._loop, function)
        if self._dead:  # the thread ended after the check and will not run the command
            self._drop_inbox()
        try:
            return await done
        finally:
            del done  # break the cycle of the error, its traceback and this frame

    async def stats(self, seconds: float = _STATS_SECONDS) -> Any:
        """The engine's statistics. If the current step takes longer than ``seconds``, those from
        before that step.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.call(lambda engine: engine.stats())
        except TimeoutError:
            return self._last_stats

    def _post(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[Engine], Any]
    ) -> asyncio.Future[Any]:
        """Queue ``function(engine)`` for the engine's thread; the future gets its result."""
        done: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def command() -> None:
            result, error = None, None
            if not self._dead:
                try:
                    result = function(self.engine)
                except RjaxError as raised:  # a refusal; its traceback is of no use
                    error = without_frames(raised)
                except Exception as raised:  # raised in the caller only
                    error = raised
            else:
                error = EngineDeadError("the engine stopped; make a new one, or restart the server")
            self._call_in_loop(settle, result, error)

        self._inbox.put(command)
        return done

    def release(self, stream: RequestStream) -> None:
        """Drop a stream, and abort its request if it is unfinished."""
        if self._streams.pop(stream.request_id, None) is None:
            return
        self._release_quota(stream)
        if not self._streams:
            self._empty.set()
        if not stream.finished:
            stream.finished = True
            request_id = stream.request_id
            self._inbox.put(lambda: self.engine.abort_request(request_id))

    def _release_quota(self, stream: RequestStream) -> None:
        """Return a request's share of the queue limits when the engine has finished it."""
        self._sequences -= stream.sequences
        self._prompt_tokens -= stream.prompt_tokens
        stream.sequences = stream.prompt_tokens = 0

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the unfinished ones. Return whether all finished in
        time."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)
        return not self._streams

    async def stop(self) -> None:
        """Abort unfinished requests and end the thread."""
        self._draining = True
        self.fail_all(OverloadedError("the server is shutting down", "draining"))
        self.end_thread()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    def end_thread(self) -> None:
        """Tell the thread to end after its current step. Does not wait; any thread may call it."""
        self._inbox.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread to end. Return whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._take_commands():
                if self.engine.has_unfinished_requests():
                    self._record_stats()
                    outputs = self.engine.step()
                    if outputs:
                        self._call_in_loop(self._deliver, outputs)
        except BaseException:
            self._dead = True
            self._failed = True
            _log.exception("the engine stopped on an error")
            self._call_in_loop(self.fail_all, EngineDeadError("the engine stopped on an error"))
            self._drop_inbox()

    def _record_stats(self) -> None:
        """Keep statistics for `stats`, in case the next step is a long one."""
        now = time.monotonic()
        if now - self._stats_time > _STATS_SECONDS:
            self._last_stats, self._stats_time = self.engine.stats(), now

    def _take_commands(self) -> bool:
        """Run the queued commands; wait for one if there are no unfinished requests.

        Returns after ``_MAX_COMMAND_SECONDS`` if there are unfinished requests, so that many
        commands do not delay the next step. Return False to stop.
        """
        end = time.monotonic() + _MAX_COMMAND_SECONDS
        while True:
            self._heartbeat = time.monotonic()
            idle = not self.engine.has_unfinished_requests()
            try:
                command = self._inbox.get(block=idle, timeout=_IDLE_WAIT)
            except queue.Empty:
                if idle:
                    continue
                return True
            if command is None:
                self._dead = True
                self._drop_inbox()
                return False
            command()
            if time.monotonic() > end and self.engine.has_unfinished_requests():
                return True

    def _drop_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._inbox.get_nowait()
                if command is not None:
                    with contextlib.suppress(Exception):
                        command()

    def _call_in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand a step's outputs to their sinks, `_MAX_OUTPUTS_A_TURN` in one turn of the loop.

        If the loop is late, the outputs of several steps are joined.
        """
        waiting = self._undelivered
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            earlier = waiting.get(output.request_id)
            if earlier is not None and stream.kind is RequestOutputKind.DELTA:
                merge_delta(earlier, output)
            else:
                waiting[output.request_id] = output
        if not self._is_delivering:
            self._deliver_some()

    def _deliver_some(self) -> None:
        waiting = self._undelivered
        for _ in range(min(len(waiting), _MAX_OUTPUTS_A_TURN)):
            self._hand_over(waiting.pop(next(iter(waiting))))
        self._is_delivering = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._deliver_some)

    def _hand_over(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            self._release_quota(stream)
        try:
            stream.sink.put(output)
        except OverloadedError as error:
            _log.warning("%s is cut off: %s", output.request_id, error)
            for other in list(self._streams.values()):
                if other.sink is stream.sink:
                    self.release(other)

    def fail_all(self, error: Exception) -> None:
        """Raise an error in every reader, after the outputs so far."""
        waiting = self._undelivered
        while waiting:
            self._hand_over(waiting.pop(next(iter(waiting))))
        for stream in list(self._streams.values()):
            stream.sink.fail(error)
