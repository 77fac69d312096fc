"""The loop of a rollout: compute prompts, start samples in free rows, decode."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int32, Key

from rjax.functional.extend import forward
from rjax.functional.sampling import sample
from rjax.functional.scheduler import (
    Copies,
    Jobs,
    PromptBatch,
    Schedule,
    can_start,
    free_rows,
    needs_prompts,
    new_schedule,
    start_samples,
    take_pages,
    take_prompts,
)
from rjax.functional.setup import Setup
from rjax.functional.state import Caches, make_caches

type Carry = tuple[Caches, Schedule]
"""What changes while prompts are computed and samples start."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    """How the tokens of each prompt's samples are drawn, and which tokens end a sample.

    Attributes:
        keys: one for each prompt.
        temperature: of each prompt.
        end_tokens: end samples of prompts without ``ignore_eos``; -1 is no token.
        ignore_eos: of each prompt.
        stop_tokens: end samples of their prompt; -1 is no token.
        top_k, top_p, min_p: see ``sample``.
    """

    keys: Key[Array, " A"]
    temperature: Float32[Array, " A"]
    end_tokens: Int32[Array, " E"]
    ignore_eos: Bool[Array, " A"]
    stop_tokens: Int32[Array, "A X"]
    top_k: int = dataclasses.field(metadata={"static": True})
    top_p: float = dataclasses.field(metadata={"static": True})
    min_p: float = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, slots=True)
class LoopSizes:
    """Fixed sizes of the loop.

    Attributes:
        rows: rows of the loop; then, for a loop each, fewer rows for the last samples.
        num_pages: pages of the pool, P.
        prompts: prompts that are computed together, G.
        chunk: tokens of each of them that are computed together, C.
        refill_rows: free rows at which waiting samples start.
        starts: most samples that start together, F.
        refills: whether samples can start after the first step.
        preempts: whether the pool can run out of pages.
    """

    rows: Sequence[int]
    num_pages: int
    prompts: int
    chunk: int
    refill_rows: int
    starts: int
    refills: bool
    preempts: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Outputs:
    """What J samples of up to Z tokens have drawn so far; undefined beyond their lengths."""

    tokens: Int32[Array, "J Z"]
    logprobs: Float32[Array, "J Z"]
    processed_logprobs: Float32[Array, "J Z"]
    lengths: Int32[Array, " J"]
    stopped: Bool[Array, " J"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _State:
    caches: Caches
    schedule: Schedule
    outputs: Outputs


def run_jobs(
    setup: Setup, weights: Any, jobs: Jobs, drawing: Drawing, sizes: LoopSizes, new_tokens: int
) -> Outputs:
    """Run all samples of all prompts to their ends.

    Args:
        weights: pytree as ``prepare`` gives it.
        new_tokens: most tokens of a sample, Z.
    """
    J = jobs.count
    dtype = nnx.merge(setup.graph, weights).dtype
    state = _State(
        make_caches(
            setup,
            num_pages=sizes.num_pages,
            num_slots=sizes.rows[0] + jobs.prompt_slots,
            dtype=dtype,
        ),
        new_schedule(
            jobs,
            rows=sizes.rows[0],
            num_pages=sizes.num_pages,
            table_pages=setup.table_pages,
        ),
        Outputs(
            jnp.zeros((J, new_tokens), jnp.int32),
            jnp.zeros((J, new_tokens), jnp.float32),
            jnp.zeros((J, new_tokens), jnp.float32),
            jnp.zeros(J, jnp.int32),
            jnp.zeros(J, bool),
        ),
    )
    refill = functools.partial(_refill, setup, weights, jobs, sizes)
    decode = functools.partial(_decode, setup, weights, jobs, drawing)
    if not sizes.refills:
        state = refill(state)
    for number, rows in enumerate(sizes.rows):
        last = number + 1 == len(sizes.rows)
        refills = sizes.refills and (number == 0 or sizes.preempts)
        state = _with_rows(state, rows)
        state = jax.lax.while_loop(
            functools.partial(_goes_on, 0 if last else sizes.rows[number + 1]),
            lambda state, refills=refills: decode(refill(state) if refills else state),
            state,
        )
    return state.outputs


def _with_rows(state: _State, count: int) -> _State:
    """The state with its first ``count`` rows, which hold all running samples."""
    rows = jax.tree.map(lambda x: x[:count], state.schedule.rows)
    return dataclasses.replace(state, schedule=dataclasses.replace(state.schedule, rows=rows))


def _goes_on(fewer_rows: int, state: _State) -> Bool[Array, ""]:
    """Whether samples wait, or more run than ``fewer_rows`` hold."""
    return jnp.any(state.schedule.waiting) | (state.schedule.running > fewer_rows)


def _refill(setup: Setup, weights: Any, jobs: Jobs, sizes: LoopSizes, state: _State) -> _State:
    """Compute the prompts that free rows need, and start samples in the free rows.

    Samples that start may leave slots to the states of further prompts.
    """
    refill_rows = sizes.refill_rows

    def needs(carry: Carry) -> Bool[Array, ""]:
        return needs_prompts(carry[1], jobs, refill_rows)

    def starts(carry: Carry) -> Bool[Array, ""]:
        return can_start(carry[1], jobs, refill_rows)

    def compute_prompts(carry: Carry) -> Carry:
        caches, schedule = carry
        schedule, batch = take_prompts(schedule, jobs, sizes.prompts)
        return _write_prompts(setup, weights, jobs, sizes, caches, batch), schedule

    def start(carry: Carry) -> Carry:
        caches, schedule = carry
        schedule, copies = start_samples(schedule, jobs, sizes.starts, refill_rows)
        return _copied(caches, copies, sizes.rows[0]), schedule

    def fill(carry: Carry) -> Carry:
        return jax.lax.while_loop(starts, start, jax.lax.while_loop(needs, compute_prompts, carry))

    carry = jax.lax.while_loop(
        lambda carry: needs(carry) | starts(carry), fill, (state.caches, state.schedule)
    )
    return _State(*carry, state.outputs)


def _copied(caches: Caches, copies: Copies, rows: int) -> Caches:
    """The caches with the pages and the states of starting samples; ``rows`` slots are of rows."""

    def with_pages(pool: Array) -> Array:
        return pool.at[copies.to_page].set(pool[copies.page], mode="drop")

    def with_slots(slots: Array) -> Array:
        return slots.at[copies.to_slot].set(slots[rows + copies.slot], mode="drop")

    return Caches(
        [with_pages(pool) for pool in caches.k_pages],
        [with_pages(pool) for pool in caches.v_pages],
        jax.tree.map(with_slots, caches.states),
    )


def _write_prompts(
    setup: Setup, weights: Any, jobs: Jobs, sizes: LoopSizes, caches: Caches, batch: PromptBatch
) -> Caches:
    """Compute the KV and the states of a batch of prompts, in chunks."""
    prompt, length, slots = batch.prompt, batch.length, sizes.rows[0] + batch.slot
    C, Q = sizes.chunk, jobs.prompts.shape[1]
    chunks = -(-Q // C)
    padded = jnp.pad(jobs.prompts, ((0, 0), (0, chunks * C - Q)))

    def write(i: Array | int, caches: Caches) -> Caches:
        tokens = jax.lax.dynamic_slice_in_dim(padded, i * C, C, axis=1)[prompt]
        counts = jnp.clip(length - i * C, 0, C)
        lengths = jnp.minimum(length, (i + 1) * C)
        given = tokens, batch.table, counts, lengths, slots, batch.writes
        return forward(setup, weights, caches, *given)[2]

    if chunks == 1:
        return write(0, caches)
    return jax.lax.fori_loop(0, -(-jnp.max(length) // C), write, caches)


def _decode(setup: Setup, weights: Any, jobs: Jobs, drawing: Drawing, state: _State) -> _State:
    """Run each row's next token, draw the one after it, and free the rows of ended samples."""
    J = jobs.count
    schedule, runs, writes = take_pages(state.schedule, jobs)
    rows = schedule.rows
    prompt, count = jobs.prompt_of(rows.job), runs.astype(jnp.int32)
    length = rows.length + count
    prefix = jobs.shared[prompt] // setup.page_size * setup.page_size
    given = rows.token[:, None], rows.table, count, length, rows.slot, writes, prefix
    model, hidden, caches = forward(setup, weights, state.caches, *given)
    number = length - jobs.lengths[prompt]  # of the drawn token in its sample
    keys = jax.vmap(jax.random.fold_in)(drawing.keys[prompt], rows.job % jobs.samples)
    drawn = sample(
        model.logits(hidden),
        jax.vmap(jax.random.fold_in)(keys, number),
        temperature=drawing.temperature[prompt],
        top_k=drawing.top_k,
        top_p=drawing.top_p,
        min_p=drawing.min_p,
    )
    token = drawn.tokens
    stopped = jnp.isin(token, drawing.end_tokens) & ~drawing.ignore_eos[prompt]
    stopped |= jnp.any(token[:, None] == drawing.stop_tokens[prompt], axis=1)
    ends = runs & (stopped | (number + 1 >= jobs.max_tokens[rows.job]))

    job, out = jnp.where(runs, rows.job, J), state.outputs
    outputs = Outputs(
        tokens=out.tokens.at[job, number].set(token, mode="drop"),
        logprobs=out.logprobs.at[job, number].set(drawn.logprobs, mode="drop"),
        processed_logprobs=out.processed_logprobs.at[job, number].set(
            drawn.processed_logprobs, mode="drop"
        ),
        lengths=out.lengths.at[job].set(number + 1, mode="drop"),
        stopped=out.stopped.at[job].set(stopped, mode="drop"),
    )
    schedule = dataclasses.replace(
        schedule,
        rows=dataclasses.replace(rows, token=jnp.where(runs, token, rows.token), length=length),
        ended=schedule.ended.at[jnp.where(ends, rows.job, J)].set(True, mode="drop"),
    )
    schedule = jax.lax.cond(
        jnp.any(ends) | schedule.lacking,
        lambda schedule: free_rows(schedule, jobs),
        lambda schedule: schedule,
        schedule,
    )
    return _State(caches, schedule, outputs)
