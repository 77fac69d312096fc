"""ProcessChannel: an engine in a process of its own."""

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from rjax.batch.compile_progress import CompileProgress
from rjax.child_python import child_command
from rjax.engine_channel.channel import EngineChannel, StepSink, check_utility
from rjax.engine_channel.error_codec import unpack_error
from rjax.engine_channel.facts import EngineFacts
from rjax.engine_channel.messages import (
    Abort,
    Add,
    Beat,
    Call,
    Command,
    Failed,
    MessageError,
    MessageReader,
    Ready,
    Reply,
    Start,
    Step,
    Stop,
    frame,
)
from rjax.engine_channel.received_request import ReceivedRequest
from rjax.engine_channel.value_codec import pack_arguments, pack_options, unpack_result
from rjax.errors import EngineDeadError
from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer

_READ_BYTES = 256 * 2**10
_POLL_SECONDS = 0.25
_SILENT_SECONDS = 10.0  # without a beat, after which "waits for a program" is not believed
_BOOT = """\
import sys
from rjax.engine_channel.engine_process import main
main(int(sys.argv[1]))
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


class ProcessChannel(EngineChannel):
    """Starts an engine process, which ends with this process.

    The process builds its engine at once; `wait_ready` waits for it.

    Args:
        factory: "module:function" that returns the engine.
        arguments: its keyword arguments, of plain values.
        prepare: "module:function" that gets the engine before it serves; None for none.

    Attributes:
        process: the engine's process.
    """

    def __init__(
        self, factory: str, arguments: Mapping[str, Any], *, prepare: str | None = None
    ) -> None:
        first = frame(Start(factory, dict(arguments), prepare))
        self._sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with other:
            self.process = _start_process(other.fileno())
        self._exit = threading.Thread(target=self.process.wait, name="rjax-engine-exit")
        self._exit.daemon = True
        self._exit.start()
        self._reader = MessageReader.of_events()
        self._requests: dict[str, ReceivedRequest] = {}
        self._calls = itertools.count()
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: StepSink | None = None
        self._on_failure: Callable[[], None] | None = None
        self._unsent = bytearray()
        self._facts: EngineFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._progress: CompileProgress | None = None
        self._heartbeat = self._last_beat = time.monotonic()
        self._stats: Any = None
        self._dead = False
        self._failed = False
        self._ending = False
        self._sock.sendall(first)

    def __del__(self) -> None:
        if (sock := getattr(self, "_sock", None)) is not None:
            sock.close()

    @property
    def facts(self) -> EngineFacts:
        """See `EngineChannel.facts`; known after `wait_ready`."""
        assert self._facts is not None, "wait_ready was not called"
        return self._facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        """A tokenizer loaded from where the engine loaded its own."""
        source = self.facts.tokenizer
        if self._tokenizer is None and source is not None:
            self._tokenizer = source.load()
        return self._tokenizer

    @property
    def heartbeat(self) -> float:
        """See `EngineChannel.heartbeat`."""
        return self._heartbeat

    @property
    def dead(self) -> bool:
        """See `EngineChannel.dead`."""
        return self._dead

    @property
    def failed(self) -> bool:
        """See `EngineChannel.failed`."""
        return self._failed

    @property
    def last_stats(self) -> Any:
        """See `EngineChannel.last_stats`."""
        return self._stats

    @property
    def is_built(self) -> bool:
        """See `EngineChannel.is_built`."""
        return self._progress is not None

    def compile_progress(self) -> CompileProgress:
        """See `EngineChannel.compile_progress`; it is known from the last beat."""
        progress = self._progress or CompileProgress(0, 0)
        if progress.waiting and time.monotonic() - self._last_beat > _SILENT_SECONDS:
            return CompileProgress(progress.compiled, progress.total, progress.waits)
        return progress

    def wait_ready(self) -> None:
        """Wait until the engine is built; blocks.

        Raises:
            InvalidConfigError, OutOfMemoryError: it cannot be built.
            EngineDeadError: its process ended.
        """
        self._read_until(lambda: self._facts is not None)

    async def start(self, on_outputs: StepSink, on_failure: Callable[[], None]) -> None:
        """See `EngineChannel.start`."""
        self._on_outputs, self._on_failure = on_outputs, on_failure
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._read)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> Awaitable[None]:
        """See `EngineChannel.add`."""
        tokens = list(prompt_token_ids)
        packed = pack_options(options, params)
        request = ReceivedRequest(params, options.get("prompt"), tokens, self.tokenizer)
        call, done = self._new_call("")
        self._requests[request_id] = request
        self._send(Add(call, request_id, tokens, request.sent_params(), packed))
        return asyncio.wrap_future(done)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `EngineChannel.abort`."""
        names = list(request_ids)
        for name in names:
            self._requests.pop(name, None)
        self._send(Abort(names))

    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """See `EngineChannel.call_utility`."""
        return asyncio.wrap_future(self._call(name, args, kwargs))

    def call_utility_sync(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """See `EngineChannel.call_utility_sync`."""
        if self._loop is None:
            done = self._call(name, args, kwargs)
            self._read_until(done.done)
            return done.result()
        started: Future[Future[Any]] = Future()

        def start() -> None:
            try:
                started.set_result(self._call(name, args, kwargs))
            except Exception as error:
                started.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(start)
        except RuntimeError as error:
            raise EngineDeadError("the event loop of this engine is closed") from error
        return self._result(self._result(started))

    def end(self) -> None:
        """See `EngineChannel.end`. The process ends within a second, whatever it is doing."""
        self._ending = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def join(self, seconds: float) -> bool:
        """See `EngineChannel.join`. A process that does not end in time is killed."""
        self._exit.join(seconds)
        if self._exit.is_alive():
            self.process.kill()
            self._exit.join(seconds)
        loop = self._loop
        if loop is None or loop.is_closed():
            self._close()
        else:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._close)
        return not self._exit.is_alive()

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        check_utility(name)
        call, done = self._new_call(name)
        self._send(Call(call, name, pack_arguments(args), pack_arguments(kwargs)))
        return done

    def _result[T](self, future: Future[T]) -> T:
        """Wait for a future that the event loop settles, which may not run any more."""
        while True:
            try:
                return future.result(_POLL_SECONDS)
            except TimeoutError:
                if self._ending and not future.done():
                    raise EngineDeadError("the engine was closed") from None

    def _new_call(self, name: str) -> tuple[int, Future[Any]]:
        if self._dead:
            raise EngineDeadError("the engine does not run; make a new one, or restart the server")
        call, done = next(self._calls), Future()
        self._waiting[call] = name, done
        return call, done

    def _send(self, command: Command) -> None:
        if self._dead or self._ending:
            return
        data = frame(command)
        if self._loop is None:
            self._sock.sendall(data)
            return
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:  # the reader finds the end
                return
            if data:
                self._loop.add_writer(self._sock, self._send_rest)
        self._unsent += data

    def _send_rest(self) -> None:
        assert self._loop is not None
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _read_until(self, condition: Callable[[], bool]) -> None:
        """Read events on this thread, before `start`."""
        while not condition():
            try:
                data = self._sock.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self._lose()
                raise EngineDeadError(f"the engine process ended: {self._exit_reason()}")
            try:
                events = list(self._reader.feed(data))
            except MessageError as error:
                self.process.kill()
                self._lose()
                raise EngineDeadError(f"the engine process sent {error}") from error
            for event in events:
                if isinstance(event, Failed):
                    self._lose()
                    raise unpack_error(event.error)
                self._take(event)

    def _read(self) -> None:
        """Read events on the event loop."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for event in self._reader.feed(data):
                self._take(event)
        except MessageError as error:
            _log.error("the engine process sent %s", error)
            self.process.kill()
            data = b""
        if not data:
            self._lose()

    def _take(self, event: Any) -> None:
        match event:
            case Step(outputs):
                assert self._on_outputs is not None
                found = []
                for packed in outputs:
                    request = self._requests.get(packed[0])
                    if request is None:  # aborted
                        continue
                    output = request.unpack(packed)
                    if request.stopped:
                        self._send(Stop(packed[0], request.stopped))
                        request.stopped = []
                    if output is None:
                        continue
                    if output.finished:
                        del self._requests[output.request_id]
                    found.append(output)
                if found:
                    self._on_outputs(found)
            case Reply(call, result, error):
                name, done = self._waiting.pop(call)
                if not done.set_running_or_notify_cancel():
                    return
                if error is not None:
                    done.set_exception(unpack_error(error))
                else:
                    done.set_result(unpack_result(name, result))
            case Beat(heartbeat, progress, stats):
                self._heartbeat, self._last_beat = heartbeat, time.monotonic()
                if progress is not None:
                    self._progress = msgspec.convert(progress, CompileProgress)
                if stats is not None:
                    self._stats = unpack_result("stats", stats)
            case Ready(facts):
                self._facts = msgspec.convert(facts, EngineFacts)
            case Failed():
                self._lose()

    def _lose(self) -> None:
        """Take note that the engine has ended."""
        if self._dead:
            return
        self._dead = True
        self._failed = not self._ending
        if self._loop is not None:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        error = EngineDeadError("the engine stopped; make a new one, or restart the server")
        waiting, self._waiting = self._waiting, {}
        for _, done in waiting.values():
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        if self._failed and self._on_failure is not None:
            threading.Thread(target=self._log_exit, name="rjax-engine-log", daemon=True).start()
            self._on_failure()

    def _log_exit(self) -> None:
        _log.error("the engine process ended: %s", self._exit_reason())

    def _exit_reason(self) -> str:
        self._exit.join(1.0)
        status = self.process.returncode
        if status is None:
            return "it closed its connection"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def _close(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._ending = True
        self._lose()
        self._sock.close()


def _start_process(fd: int) -> subprocess.Popen[bytes]:
    """Start an engine process. Its stdout is the stderr of this process, whose own stdout may be
    read by a program."""
    # The child inherits the mask: no signal may end it before it ignores them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(
            child_command(_BOOT, str(fd)),
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,  # Ctrl-C in the terminal goes to the front end only
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
