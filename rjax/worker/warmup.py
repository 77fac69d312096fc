"""Compiles every step before the first request."""

from collections.abc import Sequence

import jax
import numpy as np

from rjax.sampling import SamplerMode
from rjax.worker.compile_ahead import compile_ahead
from rjax.worker.device_state import DeviceState
from rjax.worker.step_input import build_step_input
from rjax.worker.step_runner import StepRunner
from rjax.worker.step_shape import ShapeTable, StepFeatures

_FIRST_RUNS = 2  # of a program: XLA makes its CUDA graph in the second


def compile_steps(
    runner: StepRunner,
    state: DeviceState,
    shapes: ShapeTable,
    modes: Sequence[SamplerMode],
    *,
    num_decode_steps: int,
    progress: bool,
) -> None:
    """Compile every step shape in these modes of the sampler, and run each on an empty batch.

    Steps with logprobs are rare and are compiled at their first use.

    Args:
        runner: whose programs are compiled.
        state: of the worker; the empty batch changes nothing in it.
        shapes: of the steps.
        modes: of the sampler.
        num_decode_steps: steps of a multi-step program; 1 compiles none.
        progress: show a bar.
    """
    programs = runner.programs
    steps = [(shape, StepFeatures(mode, 0, False)) for shape in shapes.all for mode in modes]
    tables = np.zeros((1, shapes.largest.table_pages), np.int32)
    packed = {
        shape: runner.pack(shape, build_step_input([], tables, shape, "off")[0])
        for shape in shapes.all
    }
    calls = [
        (
            programs.forward if programs.splits_sampling(features) else programs.step,
            shape,
            features,
            packed[shape],
        )
        for shape, features in steps
    ]
    if num_decode_steps > 1:
        calls += [
            (programs.multi_step, shape, features, np.stack([packed[shape]] * num_decode_steps))
            for shape, features in steps
            if shape in shapes.decode and not programs.splits_sampling(features)
        ]
    lowered = (
        make(shape, features).lower(runner.leaves, state.arrays, inputs)
        for make, shape, features, inputs in calls
    )
    compile_ahead(lowered, len(calls), title="Compiling steps", progress=progress)
    for shape, features in steps:
        for _ in range(_FIRST_RUNS):
            jax.block_until_ready(runner.run(state, shape, features, packed[shape]))
