"""Pause, sleep and wake-up of an engine."""

import abc
import dataclasses
from collections import deque
from collections.abc import Collection
from typing import get_args, no_type_check

from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.step_worker import SLEEP_TAGS, StepWorker
from rjax.closing import Closable
from rjax.engine.deadlines import Deadlines
from rjax.engine.named_prefixes import NamedPrefixes
from rjax.engine.protocol import RunningMode
from rjax.engine.request import Request
from rjax.engine.scheduler import Scheduler
from rjax.engine.weight_updates import WeightUpdates
from rjax.errors import EnginePausedError, EngineSleepingError, InvalidRequestError
from rjax.outputs import RequestOutput

_PAUSE = "pause"  # why the scheduler holds new requests
_SLEEPING = "the engine sleeps and serves no requests; call wake_up first"


@dataclasses.dataclass(slots=True)
class LifecycleState:
    """Whether an engine schedules steps, and which of its arrays are there.

    Attributes:
        mode: how the engine was paused; None while it runs.
        started: ids of the requests that had pages when it was paused.
        resumes_on_wake: whether it was paused for a sleep only.
        asleep: the `SLEEP_TAGS` whose arrays were given back.
        weights_dropped: whether the weights are to be those of the checkpoint.
    """

    mode: RunningMode | None = None
    started: Collection[str] = ()
    resumes_on_wake: bool = False
    asleep: frozenset[str] = frozenset()
    weights_dropped: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether no step may be dispatched, not even for requests that have started."""
        return self.mode == "keep" or bool(self.asleep)


class EngineLifecycle(Closable):
    """The methods of `rjax.engine.llm_engine.LLMEngine` that pause it and put it to sleep; see
    `rjax.engine.protocol.Engine`."""

    _worker: StepWorker
    _scheduler: Scheduler
    _prefixes: NamedPrefixes
    _weights: WeightUpdates
    _requests: dict[str, Request]
    _deadlines: Deadlines
    _in_flight: deque[DispatchedStep]
    _pending_outputs: list[RequestOutput]
    _state: LifecycleState

    @no_type_check
    def pause(self, mode: RunningMode = "abort", *, for_sleep: bool = False) -> None:
        self._check_open()
        if mode not in get_args(RunningMode):
            raise InvalidRequestError(f"mode is {mode!r}; give 'abort', 'wait' or 'keep'")
        state = self._state
        state.resumes_on_wake = for_sleep and (state.mode is None or state.resumes_on_wake)
        state.mode = mode
        if mode == "abort":
            for request_id in list(self._requests):
                self.abort_request(request_id)
        state.started = [r.request_id for r in self._requests.values() if r.has_started]
        self._scheduler.holds_new.add(_PAUSE)

    def resume(self) -> None:
        self._check_open()
        self._check_awake()
        self._state = LifecycleState()
        self._scheduler.holds_new.discard(_PAUSE)

    def is_paused(self) -> bool:
        return self._state.mode is not None

    def is_draining(self) -> bool:
        return self.is_paused() and self.has_unfinished_requests()

    def has_unfinished_requests(self) -> bool:
        state = self._state
        if self._pending_outputs or state.mode is None:
            return bool(self._requests or self._pending_outputs)
        if self._in_flight or self._deadlines.is_late:
            return True
        return not state.is_frozen and any([name in self._requests for name in state.started])

    @no_type_check  # what users give is checked by hand, with messages for them
    def check_sleep_level(self, level: int) -> None:
        self._check_open()
        if level not in (1, 2):
            raise InvalidRequestError(
                f"level is {level!r}; give 1, which keeps the weights on the host, or 2"
            )

    @no_type_check
    def sleep(self, level: int = 1) -> None:
        self.check_sleep_level(level)
        if not self.is_paused():
            self.pause("keep", for_sleep=True)
        self._read_in_flight()
        self._scheduler.preempt_all()
        self._prefixes.pinned.unload()
        self.reset_prefix_cache()
        try:
            self._worker.sleep(level)
        except Exception:
            if self._state.resumes_on_wake and not self._state.asleep:
                self.resume()
            raise
        self._state.asleep = frozenset(SLEEP_TAGS)
        self._state.weights_dropped |= level == 2

    @no_type_check
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        self._check_open()
        wanted = SLEEP_TAGS if tags is None else tags
        if isinstance(wanted, str) or not set(wanted) <= set(SLEEP_TAGS):
            raise InvalidRequestError(
                f"tags is {tags!r}; give a list of {' and '.join(map(repr, SLEEP_TAGS))}, or None "
                "for both"
            )
        for tag in SLEEP_TAGS:
            if tag in wanted and tag in self._state.asleep:
                self._worker.wake_up(tag)
                self._state.asleep -= {tag}
                if tag == "weights" and self._state.weights_dropped:
                    self._state.weights_dropped = False
                    if self._weights.version:
                        self._weights.start_version()
        if self._state.resumes_on_wake and not self._state.asleep:
            self.resume()

    def is_sleeping(self) -> bool:
        return bool(self._state.asleep)

    def _check_awake(self) -> None:
        if self._state.asleep:
            raise EngineSleepingError(_SLEEPING)

    def _check_takes_weights(self) -> None:
        if "weights" in self._state.asleep:
            raise EngineSleepingError(
                "the weights sleep and cannot be replaced; call wake_up(['weights']) first"
            )

    def _check_finishing(self) -> None:
        if self._state.is_frozen:
            raise EnginePausedError(
                "a pause keeps requests from finishing; call resume first, or give mode 'keep' or "
                "'abort'"
            )

    def _check_steps(self) -> None:
        """Check that steps are dispatched, before a call that waits for them."""
        self._check_awake()
        if self.is_paused():
            raise EnginePausedError("the engine is paused and computes nothing; call resume first")
        if self._scheduler.holds_new:
            raise EnginePausedError(
                "an update of the weights waits for the running requests, and nothing new is "
                "computed before its end; call again when finish_weight_update has returned"
            )

    @abc.abstractmethod
    def abort_request(self, request_id: str) -> None: ...

    @abc.abstractmethod
    def reset_prefix_cache(self) -> None: ...

    @abc.abstractmethod
    def _read_in_flight(self) -> None: ...
