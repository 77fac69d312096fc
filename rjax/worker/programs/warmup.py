"""The warm-up: which programs are compiled in which order, and what serves meanwhile."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Int

from rjax.sampling import ADMISSIONS, SamplerMode, lower_admission
from rjax.worker.programs.background_compiler import BackgroundCompiler, CompileTask
from rjax.worker.programs.cache import CompiledPrograms
from rjax.worker.programs.compile_process import CompileLane
from rjax.worker.programs.keys import (
    ProgramKey,
    keys_of_step,
    multi_step_key,
    prompt_logprobs_key,
    sampling_key,
    step_key,
)
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.prepare import empty_input
from rjax.worker.step.runner import StepRunner
from rjax.worker.step.shape import ShapeTable, StepShape
from rjax.worker.step.state import DeviceState

_FIRST_SHAPES = 3  # that serve every batch well, where larger steps may serve
_FIRST_RUNS = 2  # of a program: XLA makes its CUDA graph in the second
_TIMED_RUNS = 4


def warmup_keys(
    shapes: ShapeTable,
    modes: Sequence[SamplerMode],
    *,
    num_decode_steps: int,
    num_logprobs: int = 0,
    processed_logprobs: bool = False,
    spare_rows: int = 0,
) -> list[ProgramKey]:
    """The programs of all step shapes, without duplicates, in the order of compilation.

    Each step is followed by its sampling. Where a larger step may serve, the first three serve
    every batch well: the largest one prompts, the smallest one a single sequence, and that of
    ``spare_rows`` the sequences in between, which it costs little more than a step of their own
    size; the prompt logprobs of the largest one follow. Those of others are rare, and are compiled
    at their first use.

    Args:
        shapes: the engine's step shapes.
        modes: the sampler modes.
        num_decode_steps: steps of a multi-step program; 1 compiles none.
        num_logprobs: alternatives that the sampling with logprobs returns; 0 compiles none.
        processed_logprobs: compile the sampling with logprobs of the sampling distribution; without
            it, that with raw ones. The other is compiled at its first use.
        spare_rows: rows up to which a step is bound by reading the weights; 0 if a step costs as
            much as its rows.
    """
    features = [StepFeatures(mode) for mode in modes]
    found: list[ProgramKey | None] = []
    for number, shape in enumerate(_by_urgency(shapes, spare_rows)):
        found += step_key(shape), *(sampling_key(shape.seqs, each) for each in features)
        if number == min(_FIRST_SHAPES, len(shapes.all)) - 1 and num_logprobs:
            with_prompt = StepFeatures("greedy", num_prompt_logprobs=num_logprobs)
            found.append(prompt_logprobs_key(shapes.largest, with_prompt))
    if num_logprobs:
        with_logprobs = [
            StepFeatures(mode, num_logprobs, processed_logprobs=processed_logprobs)
            for mode in modes
        ]
        found += [sampling_key(s.seqs, each) for each in with_logprobs for s in shapes.all]
    if num_decode_steps > 1:
        found += [key for shape in shapes.decode for key in _multi_step_keys(shape, modes)]
    return [key for key in dict.fromkeys(found) if key is not None]


def _multi_step_keys(shape: StepShape, modes: Sequence[SamplerMode]) -> list[ProgramKey]:
    features = [StepFeatures(mode) for mode in modes if mode != "full"]
    return [multi_step_key(shape, each) for each in features]


def _by_urgency(shapes: ShapeTable, spare_rows: int) -> Iterator[StepShape]:
    decode, mixed = list(shapes.decode), [x for x in shapes.all if x not in shapes.decode]
    if spare_rows:
        wide = next((shape for shape in decode if shape.rows >= spare_rows), decode[-1])
        yield from (shapes.largest, decode[0], wide, *decode, *mixed)
        return
    while decode or mixed:
        yield from (sizes.pop(0) for sizes in (decode, mixed) if sizes)


class BackgroundWarmup:
    """The warm-up of a worker. It holds no device memory.

    Args:
        programs: programs of the steps.
        keys: keys of the programs to compile, in this order.
        max_padding: a shape may serve while the best one compiles if it has at most this many
            times the rows.
        copies: names of the programs that copy pages, and what compiles them.
        start_lanes: starts processes that compile programs of steps beside this one; None for none.
        progress: the same argument of `BackgroundCompiler`.

    Attributes:
        compiler: compiles the programs.
    """

    def __init__(
        self,
        programs: CompiledPrograms,
        keys: Iterable[ProgramKey],
        max_padding: float,
        *,
        copies: Iterable[tuple[str, CompileTask]],
        start_lanes: Callable[[], Sequence[CompileLane]] | None,
        progress: bool,
    ) -> None:
        self._programs = programs
        self._max_padding = max_padding
        self.compiler = BackgroundCompiler(progress=progress, start_lanes=start_lanes)
        sampling, vocab_size = programs.arguments.state.sampling, programs.arguments.vocab_size
        admit = {
            name: CompileTask(functools.partial(lower_admission, sampling, vocab_size, name))
            for name in ADMISSIONS
        }
        # Every request is admitted; the last programs serve preempted sequences.
        self.compiler.add("admit one", admit["one"])
        self.compiler.add("admit several", admit["several"])
        for key in keys:
            self.compile(key)
        self.compiler.add("admit continued", admit["continued"])
        for name, copy in copies:
            self.compiler.add(name, copy)

    def choose(self, fitting: list[StepShape], features: StepFeatures) -> StepShape:
        """The first shape whose programs are compiled.

        Args:
            fitting: shapes that hold the batch, the best one first. While its programs are
                compiled, another one serves, within ``max_padding``; if none is compiled, this
                waits.
            features: the step's features.
        """
        keys = keys_of_step(fitting[0], features)
        if all(map(self.compiler.is_compiled, keys)):
            return fitting[0]
        for key in keys:  # not all prompt logprobs are planned
            self.compile(key)
        most = self._max_padding * fitting[0].rows
        fitting = [shape for shape in fitting if shape.rows <= most]
        sets = [keys_of_step(shape, features) for shape in fitting]
        return fitting[self.compiler.first_compiled(sets)]

    def is_ready(self, shape: StepShape, features: StepFeatures) -> bool:
        """Whether what a step runs beside its step program is compiled, or cannot be.

        What is missing is compiled next.
        """
        keys = [key for key in keys_of_step(shape, features) if key.kind != "step"]
        if all(map(self.compiler.is_compiled, keys)):
            return True
        for key in keys:
            self.compile(key)
        return self.compiler.hurry(keys)

    def compile(self, key: ProgramKey) -> None:
        """Compile a program after all others, unless it is planned already."""
        programs = self._programs
        task = CompileTask(
            lower=functools.partial(programs.lower, key),
            compile=functools.partial(programs.compile, key),
            load=functools.partial(programs.load, key),
            beside=True,
        )
        self.compiler.add(key, task)


def run_empty_steps(
    runner: StepRunner, state: DeviceState, shapes: ShapeTable, modes: Sequence[SamplerMode]
) -> None:
    """Run every step shape in these modes of the sampler on an empty batch.

    Args:
        runner: the runner whose programs run.
        state: the worker's device state; the empty batch changes nothing in it.
        shapes: the engine's step shapes.
        modes: the sampler modes.
    """
    for shape in shapes.all:
        packed = _empty_input(runner, shape)
        for mode in modes:
            for _ in range(_FIRST_RUNS):
                result = runner.run(state, shape, StepFeatures(mode), packed)
                jax.block_until_ready(result)


def short_multi_step_keys(
    runner: StepRunner,
    state: DeviceState,
    shapes: ShapeTable,
    modes: Sequence[SamplerMode],
    *,
    num_decode_steps: int,
    seconds: float,
) -> list[ProgramKey]:
    """The multi-step programs of short decode steps.

    The steps are timed on an empty batch, which takes no longer than another. A step is short if
    several fit into ``seconds``, or if it takes the device less time than the host.

    Args:
        runner, state, shapes, modes: the arguments of `run_empty_steps`.
        num_decode_steps: steps of a multi-step program.
        seconds: longest time of a program.
    """
    return [
        key
        for shape in shapes.decode
        if _is_short(runner, state, shape, seconds / num_decode_steps)
        for key in _multi_step_keys(shape, modes)
    ]


def multi_step_seconds(
    runner: StepRunner, state: DeviceState, key: ProgramKey, num_decode_steps: int
) -> float:
    """The time of a multi-step program on empty batches, after its first runs."""
    assert key.shape is not None
    packed = np.stack([_empty_input(runner, key.shape)] * num_decode_steps)
    for _ in range(_FIRST_RUNS):
        jax.block_until_ready(runner.run_multi_step(state, key.shape, key.features, packed))
    start = time.perf_counter()
    jax.block_until_ready(runner.run_multi_step(state, key.shape, key.features, packed))
    return time.perf_counter() - start


def _is_short(runner: StepRunner, state: DeviceState, shape: StepShape, seconds: float) -> bool:
    """Whether the device takes at most ``seconds`` for a greedy step on an empty batch, or less
    than the host takes to dispatch it."""
    packed, greedy = _empty_input(runner, shape), StepFeatures("greedy")
    start = time.perf_counter()
    results = [runner.run(state, shape, greedy, packed) for _ in range(_TIMED_RUNS)]
    dispatched = time.perf_counter()
    jax.block_until_ready(results)
    end = time.perf_counter()
    host_seconds = (dispatched - start) / _TIMED_RUNS
    return end - start <= seconds * _TIMED_RUNS or end - dispatched < host_seconds


def _empty_input(runner: StepRunner, shape: StepShape) -> Int[np.ndarray, " Z"]:
    return runner.layouts[shape].pack(empty_input(shape))
