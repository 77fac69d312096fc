"""An engine on a thread of its own, for asyncio: requests in, a stream of outputs out of each."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
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
from rjax.output_queue import OutputQueue
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams

type Health = Literal["ready", "draining", "hung", "dead"]

_IDLE_WAIT = 0.25  # seconds that an idle engine thread sleeps between two beats
_MOST_COMMANDS_SECONDS = 0.05  # of commands between two steps, where there is something to step
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may be accepted and not yet finished.

    Attributes:
        sequences: most sequences, running and waiting, every sample of a request counted.
        prompt_tokens: most prompt tokens of those requests together.
        heartbeat_seconds: an engine thread silent for longer counts as hung. The first use of a
            shape compiles, which is silent too.
        unread_tokens: tokens, and alternatives in their logprobs, of one request that may wait for
            its reader. A request with more is aborted, and its reader gets an OverloadedError.
    """

    sequences: int = 1024
    prompt_tokens: int = 4_194_304
    heartbeat_seconds: float = 120.0
    unread_tokens: int = 262_144


class RequestStream:
    """The outputs of one accepted request, in order; the last one is finished.

    Leaving the ``async with`` block before the end aborts the request and frees its pages.
    """

    def __init__(
        self,
        owner: "AsyncLLMEngine",
        request_id: str,
        sequences: int,
        tokens: int,
        output_queue: OutputQueue,
    ) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.prompt_tokens = tokens
        self.finished = False
        self.output_queue = output_queue
        self._owner = owner

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        try:
            item = await self.output_queue.get()
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
        """Forget the request; one that still runs is aborted. Closing twice does nothing."""
        self._owner.forget(self)


class AsyncLLMEngine:
    """Runs an engine's steps on one thread and hands its outputs to asyncio.

    All methods but the constructor belong to one event loop, the one in which `start` was awaited.
    Nothing else may touch the engine meanwhile, except through `call`.

    Args:
        engine: ready to step.
        limits: what may be queued.
    """

    def __init__(self, engine: Engine, limits: QueueLimits | None = None) -> None:
        self.engine = engine
        self.limits = limits or QueueLimits()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._sequences = 0
        self._prompt_tokens = 0
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._run, name="rjax-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._heartbeat = time.monotonic()
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
        """Requests accepted and not finished."""
        return len(self._streams)

    @property
    def failed(self) -> bool:
        """Whether the engine stopped on an error of its own, and not because it was told to."""
        return self._failed

    @property
    def health(self) -> Health:
        """What the engine thread's last sign of life says."""
        if self._dead or (self._loop is not None and not self._thread.is_alive()):
            return "dead"
        if time.monotonic() - self._heartbeat > self.limits.heartbeat_seconds:
            return "hung"
        return "draining" if self._draining else "ready"

    def check_capacity(self, sequences: int, prompt_tokens: int) -> None:
        """Whether so much more may be queued now.

        Raises:
            OverloadedError: not now.
            EngineDeadError: not ever.
        """
        if self.health in ("dead", "hung"):
            raise EngineDeadError(
                f"the engine is {self.health}; make a new one, or restart the server"
            )
        if self._draining:
            raise OverloadedError("the server is shutting down; ask another one", "draining")
        limits = self.limits
        # How full the queue is stays untold: it is how long other tenants' prompts are.
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
        output_queue: OutputQueue | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """Hand a request to the engine; returns once the engine has taken it.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample; ``output_kind`` says what the stream's outputs hold.
            news: queue to put the outputs into, for a caller that reads several streams at once;
                it sets ``finished`` of each stream itself.
            request_id: unique among live requests; None makes one up.
            options: further arguments of the engine's ``add_request``.

        Raises:
            InvalidRequestError: the engine refuses the request.
            OverloadedError: the queue is full, or the server is shutting down.
            EngineDeadError: the engine runs no more.
        """
        sequences, tokens = params.num_sequences, len(prompt_token_ids)
        self.check_capacity(sequences, tokens)
        if output_queue is None:
            output_queue = OutputQueue(params.output_kind, self.limits.unread_tokens)
        stream = RequestStream(self, self._name(request_id), sequences, tokens, output_queue)
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
        """Run ``function(engine)`` on the engine's thread between two steps; what it raises is
        raised here and harms nothing else.

        Raises:
            EngineDeadError: the engine runs no more.
        """
        if self._dead or self._loop is None:
            raise EngineDeadError("the engine does not run; make a new one, or restart the server")
        done = self._post(self._loop, function)
        if self._dead:  # it died in between: nobody else would run the command
            self._drop_inbox()
        try:
            return await done
        finally:
            del done  # an error's traceback refers to this frame

    def _post(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[Engine], Any]
    ) -> asyncio.Future[Any]:
        """Have the engine's thread run ``function(engine)``; the future gets what comes of it."""
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
                except RjaxError as raised:  # a refusal, of which nobody needs the frames
                    error = without_frames(raised)
                except Exception as raised:  # belongs to this caller alone
                    error = raised
            else:
                error = EngineDeadError("the engine stopped; make a new one, or restart the server")
            self._call_in_loop(settle, result, error)

        self._inbox.put(command)
        return done

    def forget(self, stream: RequestStream) -> None:
        """Drop a stream; its request is aborted unless it has finished."""
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
        """The engine is done with a request, whether or not its outputs are read."""
        self._sequences -= stream.sequences
        self._prompt_tokens -= stream.prompt_tokens
        stream.sequences = stream.prompt_tokens = 0

    async def drain(self, seconds: float) -> bool:
        """Accept nothing more and wait for what runs; whether all of it finished in time."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), seconds)
        return not self._streams

    async def stop(self) -> None:
        """End the thread; what still runs is aborted."""
        self._draining = True
        self.fail_all(OverloadedError("the server is shutting down", "draining"))
        self.end_thread()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 30.0)

    def end_thread(self) -> None:
        """Have the thread end after the step that it is in, without waiting for it; any thread may
        call this."""
        self._inbox.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the thread's end; whether it has ended."""
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """The engine thread."""
        try:
            while self._take_commands():
                if self.engine.has_unfinished_requests():
                    outputs = self.engine.step()
                    if outputs:
                        self._call_in_loop(self._deliver, outputs)
        except BaseException:
            self._dead = True
            self._failed = True
            _log.exception("the engine stopped on an error")
            self._call_in_loop(self.fail_all, EngineDeadError("the engine stopped on an error"))
            self._drop_inbox()

    def _take_commands(self) -> bool:
        """Run what has come in; waits for it while there is nothing to step. False to stop.

        A flood of commands does not hold up the requests that run: after a while comes a step.
        """
        end = time.monotonic() + _MOST_COMMANDS_SECONDS
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
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                self._release_quota(stream)
            try:
                stream.output_queue.put(output)
            except OverloadedError as error:
                _log.warning("%s is cut off: %s", output.request_id, error)
                for read in list(self._streams.values()):
                    if read.output_queue is stream.output_queue:
                        self.forget(read)

    def fail_all(self, error: Exception) -> None:
        """Give an error to every reader."""
        for stream in self._streams.values():
            stream.output_queue.fail(error)
