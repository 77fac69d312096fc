"""Decides by measured times which decode steps run several to a program."""

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Hashable

from rjax.config import EngineConfig

MAX_PROGRAM_SECONDS = 0.010
"""Longest program of several decode steps, for which an arriving request may have to wait."""

_NUM_STEPS = 4  # of a program: a quarter of the dispatches and reads, and half the wait of 8
_WEIGHT = 1 / 16  # of the newest time
_LATE, _NOT_LATE = 0.75, 0.5  # shares of late steps from which several steps pay, and no longer do
_FEW = 4  # steps, before which nothing is decided
_PAUSE = 512  # single steps before several are tried again
_STREAM_SPEED_UP = 2  # from which tokens in groups are worth it to a stream
_FIRST_RUNS = 3  # of a program: XLA makes its CUDA graph in the second
_BYTES_PER_SECOND = 3e12  # that a Hopper GPU reads
_COMPILE_SECONDS = 2.0  # that lowering a program takes from the host


@dataclasses.dataclass(slots=True, eq=False)
class DecodeProgram:
    """A dispatched program of decode steps.

    Attributes:
        key: key of the multi-step program for such steps.
        num_steps: number of decode steps that it runs.
        dispatched: time of its dispatch.
        is_read: whether the tokens of one of its steps were read.
    """

    key: Hashable
    num_steps: int
    dispatched: float
    is_read: bool = False


@dataclasses.dataclass(slots=True)
class _Times:
    """Times of the decode steps of one key.

    Attributes:
        pays: whether several steps a program are faster.
        steps: number of steps that ran alone since the last pause.
        late: smoothed share of single steps that the device had finished when the host read them.
        late_seconds: total time of those.
        single: smoothed seconds of a late single step: the host's time.
        program: smoothed seconds of a program of several steps; None if it has to be measured.
        programs: number of programs of several steps, read so far.
        pause: single steps before several are tried again.
        since_program: single steps since a program of several.
    """

    pays: bool = False
    steps: int = 0
    late: float = 0.0
    late_seconds: float = 0.0
    single: float | None = None
    program: float | None = None
    programs: int = 0
    pause: int = 0
    since_program: int = 0

    def pays_for_streams(self, num_steps: int) -> bool:
        """Whether several steps are so much faster, or it has to be measured whether they are."""
        if not self.pays or self.single is None:
            return False
        return self.program is None or _STREAM_SPEED_UP * self.program <= num_steps * self.single

    def add_step(self, seconds: float, *, late: bool) -> None:
        """Add a step that ran alone."""
        self.steps += 1
        self.late += max(_WEIGHT, 1 / self.steps) * (late - self.late)  # at first the mean
        self.pause = max(0, self.pause - 1)
        self.since_program += 1
        if self.since_program >= _PAUSE:
            self.program = None
        if late:
            self.late_seconds += seconds
            self.single = _smoothed(self.single, seconds)
        is_known = self.steps >= _FEW and not self.pause
        self.pays = is_known and self.late > (_NOT_LATE if self.pays else _LATE)

    def add_program(self, seconds: float, num_steps: int) -> None:
        """Add a program of several steps."""
        self.programs += 1
        self.since_program = 0
        if self.programs <= _FIRST_RUNS:
            return
        self.program = _smoothed(self.program, seconds)
        longest = MAX_PROGRAM_SECONDS
        if self.single is not None:
            longest = min(longest, num_steps * self.single)
        if self.program > longest:
            self.pays, self.steps, self.late = False, 0, 0.0
            self.pause, self.program = _PAUSE, None


class MultiStepPolicy:
    """Decides for each key, which stands for a step size and its sampling, from times of its steps.

    The host is slower than the device if the device has finished most steps when the host reads
    them; then several steps a program pay. They no longer do if a program takes longer than its
    steps took alone, because the device has become the slower one, or longer than 10 ms. The first
    is measured in steps that run alone, the second in programs of several steps, so each mode says
    when to leave it; a pause keeps the two from alternating. A request that streams gets its tokens
    in groups only if they come at least twice as fast, for which a program is run now and then.

    A time counts from one read to the next, and only if the program was dispatched before the
    first of them, so that the device was not idle in between for want of requests, and if the host
    prepared a program of as many steps meanwhile.

    Args:
        num_steps: decode steps of one program.
        clock: gives seconds.
    """

    def __init__(
        self, num_steps: int = _NUM_STEPS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_steps = num_steps
        self._clock = clock
        self._times: collections.defaultdict[Hashable, _Times] = collections.defaultdict(_Times)
        self._allowed: Collection[Hashable] | None = None
        self._last_read: float | None = None
        self._last_dispatched: DecodeProgram | None = None

    def allow_only(self, keys: Collection[Hashable]) -> None:
        """Let several steps pay for these keys only."""
        self._allowed = keys

    def measured(self, key: Hashable, seconds: float) -> None:
        """Note what a program of several steps of this key took, after its first runs."""
        times = self._times[key]
        times.program, times.programs = seconds, _FIRST_RUNS

    def pays(self, key: Hashable, *, streams: bool) -> bool:
        """Whether decode steps of this key should run several to a program.

        Args:
            key: key of the steps.
            streams: whether some request is to get each token at once.
        """
        if self._allowed is not None and key not in self._allowed:
            return False
        times = self._times[key]
        return times.pays_for_streams(self.num_steps) if streams else times.pays

    def pays_to_compile(self, key: Hashable) -> bool:
        """Whether the host has been too slow for as long as compiling a program disturbs it; for
        keys of which several steps pay."""
        return self._times[key].late_seconds >= _COMPILE_SECONDS

    def dispatched(self, key: Hashable, num_steps: int) -> DecodeProgram:
        """Note that a program is dispatched now, and return it."""
        self._last_dispatched = DecodeProgram(key, num_steps, self._clock())
        return self._last_dispatched

    def read(self, program: DecodeProgram, *, late: bool) -> None:
        """Note that the tokens of a step are on the host now.

        Args:
            program: program that ran the step.
            late: whether the device had finished it when the host began to read.
        """
        if program.is_read:
            return
        program.is_read = True
        last, now = self._last_read, self._clock()
        self._last_read = now
        if last is None or program.dispatched > last:
            return
        assert self._last_dispatched is not None
        if self._last_dispatched.num_steps != program.num_steps:
            return
        times = self._times[program.key]
        if program.num_steps == 1:
            times.add_step(now - last, late=late)
        else:
            times.add_program(now - last, program.num_steps)

    def interrupt(self) -> None:
        """Note a read that says nothing about decode steps."""
        self._last_read = None


def may_pay(weight_bytes: int, num_steps: int) -> bool:
    """Whether ``num_steps`` steps, each of which reads the weights, can be a program that is short
    enough to pay."""
    return num_steps * weight_bytes / _BYTES_PER_SECOND <= MAX_PROGRAM_SECONDS


def multi_step_policy(config: EngineConfig, *, platform: str) -> MultiStepPolicy | None:
    """The policy of an engine; None if the configuration has a number of decode steps, on a CPU,
    which is never faster than its host, and with warm-up "off", where a program would compile in
    the middle of a run."""
    automatic = config.scheduler.num_decode_steps == "auto"
    if not automatic or platform == "cpu" or config.warmup == "off":
        return None
    return MultiStepPolicy()


def _smoothed(old: float | None, new: float) -> float:
    """The smoothed time with a new one; an outlier counts as twice the old one at most."""
    return new if old is None else old + _WEIGHT * (min(new, 2 * old) - old)
