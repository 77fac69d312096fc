"""Which programs a warm-up compiles, and in which order."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from rjax.sampling import SamplerMode
from rjax.worker.device_state import DeviceState
from rjax.worker.programs import ProgramKey, multi_step_key, sampling_key, step_key
from rjax.worker.step_input import build_step_input
from rjax.worker.step_runner import StepRunner
from rjax.worker.step_shape import ShapeTable, StepFeatures, StepShape

_FIRST_RUNS = 2  # of a program: XLA makes its CUDA graph in the second


def warmup_keys(
    shapes: ShapeTable,
    modes: Sequence[SamplerMode],
    *,
    num_decode_steps: int,
    num_logprobs: int = 0,
    largest_first: bool = False,
) -> list[ProgramKey]:
    """The programs of all step shapes, without duplicates, in the order of compilation.

    The smallest steps come first, which the first user of a server needs. Each step is followed by
    its sampling. Steps with prompt logprobs are rare and are compiled at their first use.

    Args:
        shapes: of the steps.
        modes: of the sampler.
        num_decode_steps: steps of a multi-step program; 1 compiles none.
        num_logprobs: alternatives that the sampling with logprobs returns; 0 compiles none.
        largest_first: begin with the largest step, which serves every batch.
    """
    features = [StepFeatures(mode, 0, False) for mode in modes]
    greedy = StepFeatures("greedy", 0, False)
    found: list[ProgramKey | None] = []
    first = [shapes.largest] if largest_first else []
    for shape in (*first, *_by_urgency(shapes)):
        found += step_key(shape, greedy), *(sampling_key(shape.seqs, each) for each in features)
    if num_logprobs:
        logprobs = StepFeatures("full", num_logprobs, False)
        found += [sampling_key(shape.seqs, logprobs) for shape in shapes.all]
    if num_decode_steps > 1:
        found += [
            multi_step_key(shape, each)
            for shape in shapes.decode
            for each in features
            if each.sampling != "full"
        ]
    return [key for key in dict.fromkeys(found) if key is not None]


def _by_urgency(shapes: ShapeTable) -> Iterator[StepShape]:
    decode, mixed = list(shapes.decode), [x for x in shapes.all if x not in shapes.decode]
    while decode or mixed:
        yield from (sizes.pop(0) for sizes in (decode, mixed) if sizes)


def run_empty_steps(
    runner: StepRunner, state: DeviceState, shapes: ShapeTable, modes: Sequence[SamplerMode]
) -> None:
    """Run every step shape in these modes of the sampler on an empty batch.

    Args:
        runner: whose programs run.
        state: of the worker; the empty batch changes nothing in it.
        shapes: of the steps.
        modes: of the sampler.
    """
    tables = np.zeros((1, shapes.largest.table_pages), np.int32)
    for shape in shapes.all:
        packed = runner.layout(shape).pack(build_step_input([], tables, shape, "off")[0])
        for mode in modes:
            for _ in range(_FIRST_RUNS):
                result = runner.run(state, shape, StepFeatures(mode, 0, False), packed)
                jax.block_until_ready(result)
