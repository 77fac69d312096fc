"""The compiled decode step of an engine, timed without the engine: the limit of its throughput.

Calls the engine's compiled program repeatedly with one input, on its weights and pages. A GPU at
its power limit lowers its clock, so the step is timed twice: in a run of several seconds
(sustained) and in short bursts. The engine must be idle; its cached pages are overwritten.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from bench.decode_step.roofline import DecodeCase
from bench.kernels.timing import burst_seconds, seconds_per_call
from rjax.pallas_kernels.attention.plan.host import plan_attention
from rjax.worker.programs.keys import step_key
from rjax.worker.step.input import GroupInput, StepInput
from rjax.worker.step.shape import StepShape
from rjax.worker.worker import Worker

_SECONDS = 0.7  # seconds of the shorter of two runs on a GPU; both, three times: 8.4 s
_BURST_SECONDS = 0.04
_MOST_REPEATS = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class BareStep:
    """Seconds of a step, sustained and in bursts; a CPU has only the former."""

    sustained: float
    burst: float


def time_bare_step(llm: Any, case: DecodeCase) -> BareStep | None:
    """Time a greedy step of ``case.batch`` sequences at the end of their tokens.

    Returns:
        None for a model with windows: this input has one page table a sequence.

    Raises:
        ValueError: the pool is too small.
    """
    worker: Worker = llm.engine._worker
    llm.reset_prefix_cache()
    shape = worker.shapes.choose(rows=case.batch, seqs=case.batch)
    if shape.groups.windows != (None,):
        return None
    step = worker._runner.programs.get(step_key(shape))
    packed = worker._runner.layouts[shape].pack(_input(case, shape, worker))

    def run() -> jax.Array:
        worker._state.arrays, result = step(worker._runner.leaves, worker._state.arrays, packed)
        return result.tokens

    jax.block_until_ready(run())
    if jax.default_backend() != "gpu":
        seconds = seconds_per_call(run, repeats=2)
        return BareStep(seconds, seconds)
    start = time.perf_counter()
    jax.block_until_ready(run())
    about = time.perf_counter() - start
    repeats = max(2, min(_MOST_REPEATS, round(_SECONDS / about)))
    burst = max(2, round(_BURST_SECONDS / about))
    return BareStep(seconds_per_call(run, repeats, rounds=3), burst_seconds(run, burst))


def _input(case: DecodeCase, shape: StepShape, worker: Worker) -> StepInput:
    """Page tables: full pages of the shared tokens are in every table, the rest is unique."""
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
    plan, _ = plan_attention(
        table,
        np.arange(B + 1, dtype=np.int32),
        np.full(B, case.context, np.int32),
        page_size=S,
        shape=shape.plans[0],
        sharing=worker.input_builder.sharing,
    )

    def rows(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, shape.rows - B), constant_values=-1)

    def sequences(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, shape.seqs - B))

    kv_slots = rows(table[:, last // S] * S + last % S)
    table = np.pad(table, ((0, shape.seqs - B), (0, 0)))
    return StepInput(
        tokens=np.zeros(shape.rows, np.int32),
        token_slot=rows(every),
        positions=rows(np.full(B, last, np.int32)),
        groups=(GroupInput((kv_slots,), (table,), None, plan),),
        sample_row=sequences(every),
        slots=sequences(every),
        live=sequences(np.ones(B, np.int32)),
        table_pages=shape.table_pages,
    )
