"""EngineLoop: steps an engine on one thread and runs commands between the steps."""

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable
from typing import Any

from rjax.engine.protocol import Engine
from rjax.errors import EngineDeadError, RjaxError, without_frames
from rjax.outputs import RequestOutput

STATS_SECONDS = 1.0
"""Interval in which statistics are recorded."""

_IDLE_WAIT = 0.25  # seconds between two heartbeats of an idle engine
_MAX_COMMAND_SECONDS = 0.05  # for commands between two steps while requests are unfinished
_log = logging.getLogger(__name__)

type Settle = Callable[[Any, Exception | None], None]
type Inbox = queue.SimpleQueue[Callable[[], None] | None]
"""Commands; None ends the loop."""


def ignore_result(result: Any, error: Exception | None) -> None:
    """A `Settle` that drops the result."""


class EngineLoop:
    """The loop of the thread that owns an engine.

    Args:
        engine: the engine; nothing else may use it, except for methods that any thread may call.

    Attributes:
        inbox: commands that it runs between steps.
        heartbeat: time of ``time.monotonic`` at which the loop was last between two steps.
        dead: whether the loop has ended, and runs no further command.
        failed: whether it ended on an error.
        last_stats: statistics from before the current step; None before the first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heartbeat = time.monotonic()
        self.dead = False
        self.failed = False
        self.last_stats: Any = None
        self._stats_time = -math.inf
        self.inbox: Inbox = queue.SimpleQueue()

    def post(self, function: Callable[[Engine], Any], settle: Settle = ignore_result) -> None:
        """Run ``function(engine)`` between two steps, and pass its result or its error to
        ``settle`` on the same thread. Any thread may call this."""

        def command() -> None:
            if self.dead:
                message = "the engine stopped; make a new one, or restart the server"
                settle(None, EngineDeadError(message))
                return
            try:
                result = function(self.engine)
            except RjaxError as error:  # a refusal; its traceback is of no use
                settle(None, without_frames(error))
            except Exception as error:  # raised in the caller only
                settle(None, error)
            else:
                settle(result, None)

        self.inbox.put(command)
        if self.dead:  # the loop ended after the caller looked, and does not run the command
            self._drop_inbox()

    def end(self) -> None:
        """End after the current step. Any thread may call this."""
        self.inbox.put(None)

    def run(
        self, deliver: Callable[[list[RequestOutput]], None], on_failure: Callable[[], None]
    ) -> None:
        """Run until `end` or until the engine fails.

        Args:
            deliver: takes the outputs of a step.
            on_failure: called when the engine has failed.
        """
        try:
            while self._take_commands():
                if self.engine.has_unfinished_requests():
                    self._record_stats()
                    outputs = self.engine.step()
                    if outputs:
                        deliver(outputs)
        except BaseException:
            self.dead = True
            self.failed = True
            _log.exception("the engine stopped on an error")
            on_failure()
            self._drop_inbox()

    def _record_stats(self) -> None:
        """Keep statistics in case the next step is a long one."""
        now = time.monotonic()
        if now - self._stats_time > STATS_SECONDS:
            self.last_stats, self._stats_time = self.engine.stats(), now

    def _take_commands(self) -> bool:
        """Run the queued commands; wait for one if there are no unfinished requests.

        Returns after ``_MAX_COMMAND_SECONDS`` if there are unfinished requests, so that many
        commands do not delay the next step. Return False to stop.
        """
        end = time.monotonic() + _MAX_COMMAND_SECONDS
        while True:
            self.heartbeat = time.monotonic()
            idle = not self.engine.has_unfinished_requests()
            try:
                command = self.inbox.get(block=idle, timeout=_IDLE_WAIT)
            except queue.Empty:
                if idle:
                    continue
                return True
            if command is None:
                self.dead = True
                self._drop_inbox()
                return False
            command()
            if time.monotonic() > end and self.engine.has_unfinished_requests():
                return True

    def _drop_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.inbox.get_nowait()
                if command is not None:
                    with contextlib.suppress(Exception):
                        command()
