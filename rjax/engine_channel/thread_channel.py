"""ThreadChannel: an engine on a thread of this process."""

import asyncio
import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rjax.batch.compile_progress import CompileProgress
from rjax.engine.protocol import Engine
from rjax.engine_channel.channel import EngineChannel, StepSink, check_utility
from rjax.engine_channel.engine_loop import EngineLoop, Inbox, Settle
from rjax.engine_channel.facts import EngineFacts, facts_of
from rjax.engine_channel.request_intake import RequestIntake
from rjax.errors import EngineDeadError
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer

_EXIT_SECONDS = 60.0  # for the current step, when the program ends


class ThreadChannel(EngineChannel):
    """Runs the steps of an engine on one thread.

    Args:
        engine: the engine; nothing else may step it.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._engine_loop = EngineLoop(engine)
        self._intake = RequestIntake(self._engine_loop)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._facts: EngineFacts | None = None
        self.thread: threading.Thread | None = None
        self._at_exit: Callable[[], None]

    @property
    def facts(self) -> EngineFacts:
        """See `EngineChannel.facts`; they are first read before `start`."""
        if self._facts is None:
            self._facts = facts_of(self.engine)
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer."""
        return self.engine.tokenizer

    @property
    def heartbeat(self) -> float:
        """See `EngineChannel.heartbeat`."""
        return self._engine_loop.heartbeat

    @property
    def dead(self) -> bool:
        """Whether the thread has ended."""
        return self._engine_loop.dead or (self.thread is not None and not self.thread.is_alive())

    @property
    def failed(self) -> bool:
        """See `EngineChannel.failed`."""
        return self._engine_loop.failed

    @property
    def last_stats(self) -> Any:
        """See `EngineChannel.last_stats`."""
        return self._engine_loop.last_stats

    @property
    def is_built(self) -> bool:
        """Always true; see `EngineChannel.is_built`."""
        return True

    def compile_progress(self) -> CompileProgress:
        """See `EngineChannel.compile_progress`."""
        return self.engine.compile_progress()

    async def start(self, on_outputs: StepSink, on_failure: Callable[[], None]) -> None:
        """Start the thread; see `EngineChannel.start`."""
        loop = self._loop = asyncio.get_running_loop()

        def deliver(outputs: list[RequestOutput]) -> None:
            _call_in(loop, on_outputs, outputs)

        self._engine_loop.heartbeat = time.monotonic()
        self.thread = threading.Thread(
            target=self._engine_loop.run,
            args=(deliver, lambda: _call_in(loop, on_failure)),
            name="rjax-engine",
            daemon=True,
        )
        # Python stops daemon threads at its end, and one that is stopped inside of XLA, as while it
        # frees the engine, aborts the process.
        self._at_exit = functools.partial(_end_thread, self._engine_loop.inbox, self.thread)
        atexit.register(self._at_exit)
        self.thread.start()

    async def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> None:
        """See `EngineChannel.add`."""
        done, settle = self._future()
        self._intake.add(request_id, list(prompt_token_ids), params, options, settle)
        try:
            await done
        finally:
            del done, settle  # break the cycle of the error, its traceback and this frame

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `EngineChannel.abort`."""
        self._intake.abort(request_ids)

    async def run[T](self, function: Callable[[Engine], T]) -> T:
        """Run ``function(engine)`` on the engine's thread between two steps. Its exception is
        raised here and does not stop the engine.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        done, settle = self._future()
        self._engine_loop.post(function, settle)
        try:
            return await done
        finally:
            del done, settle

    async def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `EngineChannel.call_utility`."""
        check_utility(name)
        return await self.run(lambda engine: getattr(engine, name)(*args, **kwargs))

    def call_utility_sync(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `EngineChannel.call_utility_sync`."""
        check_utility(name)
        if self.thread is None:
            return getattr(self.engine, name)(*args, **kwargs)
        done: Future[Any] = Future()

        def settle(result: Any, error: Exception | None) -> None:
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        self._engine_loop.post(lambda engine: getattr(engine, name)(*args, **kwargs), settle)
        return done.result()

    def end(self) -> None:
        """See `EngineChannel.end`."""
        self._engine_loop.end()
        self._intake.close()

    def join(self, seconds: float) -> bool:
        """See `EngineChannel.join`."""
        if self.thread is None:
            return True
        self.thread.join(seconds)
        if self.thread.is_alive():
            return False
        atexit.unregister(self._at_exit)
        return True

    def _future(self) -> tuple[asyncio.Future[Any], Settle]:
        """A future of the event loop, and what settles it from the engine's thread."""
        loop = self._loop
        if loop is None or self._engine_loop.dead:
            raise EngineDeadError("the engine does not run; make a new one, or restart the server")
        done: asyncio.Future[Any] = loop.create_future()

        def settle_in_loop(result: Any, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        return done, lambda result, error: _call_in(loop, settle_in_loop, result, error)


def _end_thread(inbox: Inbox, thread: threading.Thread) -> None:
    """End an engine's thread at the end of the program."""
    inbox.put(None)
    thread.join(_EXIT_SECONDS)


def _call_in(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(function, *arguments)
