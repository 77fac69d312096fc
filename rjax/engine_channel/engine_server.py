"""EngineServer: the engine process, from the socket to the engine and back."""

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import queue
import socket
import threading
import time
from typing import Any

from rjax.closing import Closable
from rjax.engine.protocol import Engine
from rjax.engine_channel.channel import check_utility
from rjax.engine_channel.engine_loop import EngineLoop
from rjax.engine_channel.error_codec import pack_error, says_all
from rjax.engine_channel.facts import facts_of
from rjax.engine_channel.message_sender import MessageSender
from rjax.engine_channel.messages import (
    Abort,
    Add,
    Beat,
    Call,
    Failed,
    MessageError,
    MessageReader,
    Ready,
    Reply,
    Start,
    Stop,
)
from rjax.engine_channel.request_intake import RequestIntake
from rjax.engine_channel.value_codec import pack_result, unpack_options, unpack_params
from rjax.engine_channel.weight_file import read_weight_file
from rjax.errors import EngineDeadError, InvalidRequestError, RjaxError

_BEAT_SECONDS = 0.25
_GRACE_SECONDS = 1.0  # for the engine to end after its front end has gone
_FLUSH_SECONDS = 1.0  # for the last messages
_READ_BYTES = 256 * 2**10
_log = logging.getLogger(__name__)


class EngineServer:
    """Builds an engine and runs it for the front end at the other end of a socket.

    The engine has the thread that calls `run`. A thread reads commands, so that the process ends
    when its front end does, whatever the engine is doing.

    Args:
        sock: socket that is connected to the front end.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sender = MessageSender(sock)
        self._started: queue.SimpleQueue[Start] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._loop: EngineLoop | None = None
        self._intake: RequestIntake | None = None
        self._gone = False
        self._status = 0

    def run(self) -> int:
        """Serve until the front end ends or the engine fails; returns the exit status."""
        threading.Thread(target=self._read, name="rjax-read", daemon=True).start()
        start = self._started.get()
        threading.Thread(target=self._beat, name="rjax-beat", daemon=True).start()
        try:
            engine = self._engine = _function(start.factory)(**start.arguments)
            if start.prepare is not None:
                _function(start.prepare)(engine)
            facts = dataclasses.asdict(facts_of(engine))
        except Exception as error:
            if not says_all(error):
                _log.exception("the engine could not be built")
            self._sender.send(Failed(pack_error(error)))
            self._sender.flush(_FLUSH_SECONDS)
            return 1
        loop = self._loop = EngineLoop(engine)
        self._intake = RequestIntake(loop)
        gc.collect()
        gc.freeze()  # exclude the long-lived objects from garbage collection
        self._sender.send(Ready(facts))
        if self._gone:
            loop.end()
        loop.run(self._sender.send_outputs, self._fail)
        self._sender.flush(_FLUSH_SECONDS)
        if loop.failed:
            return 1
        if isinstance(engine, Closable):
            engine.close()
        return self._status

    def _fail(self) -> None:
        self._sender.send(Failed(pack_error(EngineDeadError("the engine stopped on an error"))))

    def _read(self) -> None:
        """Read commands; the target of a thread."""
        reader = MessageReader.of_commands()
        try:
            while data := self._sock.recv(_READ_BYTES):
                for command in reader.feed(data):
                    self._take(command)
        except MessageError as error:
            _log.error("the front end sent %s", error)
            self._status = 1
        except ConnectionError:
            pass
        except Exception:
            _log.exception("the engine process cannot go on")
            self._status = 1
        self._gone = True
        if self._loop is not None:
            self._loop.end()
        time.sleep(_GRACE_SECONDS)  # the main thread usually ends the process before
        os._exit(self._status)

    def _take(self, command: Any) -> None:
        match command:
            case Start():
                self._started.put(command)
            case Add():
                self._add(command)
            case Abort(request_ids):
                assert self._intake is not None
                self._intake.abort(request_ids)
            case Stop(request_id, samples):
                assert self._loop is not None
                self._loop.post(lambda engine: engine.stop_samples(request_id, samples))
            case Call(call, name, args, kwargs):
                assert self._loop is not None

                def utility(engine: Engine) -> Any:
                    check_utility(name)
                    if name == "add_weights":
                        args[0] = read_weight_file(args[0])
                    return pack_result(getattr(engine, name)(*args, **kwargs))

                self._loop.post(utility, lambda result, error: self._reply(call, result, error))

    def _add(self, command: Add) -> None:
        name = command.request_id
        try:
            params = unpack_params(command.params)
            options = unpack_options(command.options)
        except (RjaxError, ValueError, TypeError) as error:
            self._reply(command.call, None, InvalidRequestError(str(error)))
            return

        def settle(result: Any, error: Exception | None) -> None:
            if error is not None:
                self._sender.close_request(name)
            self._reply(command.call, None, error)

        assert self._intake is not None
        self._sender.open_request(name, len(command.token_ids))
        self._intake.add(name, command.token_ids, params, options, settle)

    def _reply(self, call: int, result: Any, error: Exception | None) -> None:
        if error is not None and not isinstance(error, RjaxError):
            _log.error("a call of the front end failed", exc_info=error)
        self._sender.send(Reply(call, result, None if error is None else pack_error(error)))

    def _beat(self) -> None:
        """Send signs of life; the target of a thread."""
        sent: Any = None
        while True:
            beat = Beat(time.monotonic())
            loop, engine = self._loop, self._engine
            if engine is not None:
                with contextlib.suppress(Exception):  # closed; the beats go on
                    beat.progress = dataclasses.asdict(engine.compile_progress())
            if loop is not None:
                beat.heartbeat = loop.heartbeat
                if loop.last_stats is not sent:
                    sent = loop.last_stats
                    beat.stats = pack_result(sent)
            self._sender.send(beat)
            time.sleep(_BEAT_SECONDS)


def _function(name: str) -> Any:
    """The function of this name, "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
