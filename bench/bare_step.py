"""The decode step of a running engine without its engine: the most that its tokens a second can be.

The very program that the engine has compiled, on the engine's own weights and pages, called again
and again with one input that lies on the device. The engine must be idle, and its cached pages hold
nothing of use afterwards.
"""

from typing import Any

import jax
import numpy as np

from bench.kernels.timing import seconds_per_call
from bench.step_floor import DecodeCase
from pallas_kernels.attention.planner import plan_attention
from rjax.worker.step_input import StepInput
from rjax.worker.step_shape import StepFeatures, StepShape
from rjax.worker.worker import Worker


def bare_step_seconds(llm: Any, case: DecodeCase) -> float:
    """Seconds of a greedy step of ``case.batch`` sequences, each at the end of its tokens.

    Raises:
        ValueError: the batch is no step size of this engine, or its pool is too small.
    """
    worker: Worker = llm.engine._worker
    llm.reset_prefix_cache()
    shape = worker.shapes.choose(rows=case.batch, seqs=case.batch)
    if shape.seqs != case.batch:
        raise ValueError(
            f"{case.batch} sequences run in a step of {shape.seqs}; measure a batch of that size"
        )
    step = worker._programs.whole(shape, StepFeatures("greedy", 0, False))
    given = _input(case, shape, worker)
    packed = jax.device_put(worker._programs.layout(shape).pack(given), worker._everywhere)

    def run() -> jax.Array:
        worker._state, result = step(worker._leaves, worker._state, packed)
        return result.tokens

    jax.block_until_ready(run())
    return seconds_per_call(run, repeats=8 if jax.default_backend() == "gpu" else 2)


def _input(case: DecodeCase, shape: StepShape, worker: Worker) -> StepInput:
    """Whole pages of the shared tokens stand in every table; what is left over is own."""
    B, S = case.batch, shape.page_size
    common, own = case.shared // S, -(-case.context // S) - case.shared // S
    needed = common + B * own
    if needed > worker.pool.num_pages:
        raise ValueError(f"the case takes {needed} pages; the pool has {worker.pool.num_pages}")
    ids = np.random.default_rng(0).permutation(needed).astype(np.int32)
    table = np.zeros((B, shape.table_pages), np.int32)
    table[:, :common] = ids[:common]
    table[:, common : common + own] = ids[common:].reshape(B, own)
    every, last = np.arange(B, dtype=np.int32), case.context - 1
    padding = (0, shape.rows - B)
    plan, _ = plan_attention(
        table,
        np.arange(B + 1, dtype=np.int32),
        np.full(B, case.context, np.int32),
        page_size=S,
        shape=shape.plan,
        sharing=worker._sharing,
    )
    return StepInput(
        tokens=np.zeros(shape.rows, np.int32),
        token_slot=np.pad(every, padding, constant_values=-1),
        positions=np.pad(np.full(B, last, np.int32), padding, constant_values=-1),
        kv_slots=np.pad(table[:, last // S] * S + last % S, padding, constant_values=-1),
        targets=np.zeros(shape.rows, np.int32),
        page_table=table,
        sample_row=every,
        slots=every,
        live=np.ones(B, np.int32),
        plan=plan,
    )
