"""Run tokens through the model and append their KV: prompts, chunks of prompts, single tokens."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rjax.batch.page_groups import one_group
from rjax.functional.setup import Setup
from rjax.functional.state import DecodeState, Pools
from rjax.models import Decoder
from rjax.pallas_kernels.attention.plan.device import plan_on_device
from rjax.worker.paged_operations import PagedOperations
from rjax.worker.step.input import GroupInput, StepInput


def prefill(
    setup: Setup,
    weights: Any,
    state: DecodeState,
    tokens: Int[Array, "B Q"],
    counts: Int[Array, " B"],
) -> tuple[DecodeState, Float[Array, "B V"]]:
    """Append the first ``counts[b]`` tokens of row b to its sequence.

    Call it repeatedly to prefill a long prompt in chunks. A row with count 0 does not change, and
    its logits are undefined.

    Args:
        weights: pytree as ``prepare`` gives it.
        tokens: token ids, right-padded with any value.
        counts: number of tokens to append to each row, 0 to Q.

    Returns:
        The new state, and the float32 logits of each row's next token. A row that does not fit the
        pool or ``max_context`` does not change and gets NaN logits.
    """
    return _extend(setup, weights, state, tokens, counts)


def decode(
    setup: Setup,
    weights: Any,
    state: DecodeState,
    tokens: Int[Array, " B"],
    live: Bool[Array, " B"] | None = None,
) -> tuple[DecodeState, Float[Array, "B V"]]:
    """Append one token to each live row; see ``prefill``. Shared KV is read once per step."""
    B = tokens.shape[0]
    counts = jnp.ones(B, jnp.int32) if live is None else live.astype(jnp.int32)
    return _extend(setup, weights, state, tokens[:, None], counts)


def _extend(
    setup: Setup,
    weights: Any,
    state: DecodeState,
    tokens: Int[Array, "B Q"],
    counts: Int[Array, " B"],
) -> tuple[DecodeState, Float[Array, "B V"]]:
    B, Q = tokens.shape
    table, counts, fits, used = _take_pages(setup, state, counts)
    lengths = state.lengths + counts
    pools = state.k_pages, state.v_pages
    model, hidden, pools = forward(setup, weights, pools, tokens, table, counts, lengths)
    last = jnp.arange(B) * Q + jnp.maximum(counts - 1, 0)
    logits = jnp.where(fits[:, None], model.logits(hidden[last]), jnp.nan)
    new = DecodeState(
        k_pages=pools[0],
        v_pages=pools[1],
        page_table=table,
        lengths=lengths,
        pages_used=used,
    )
    return new, logits


def forward(
    setup: Setup,
    weights: Any,
    pools: Pools,
    tokens: Int[Array, "B Q"],
    table: Int[Array, "B M"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    writes: Bool[Array, " B"] | None = None,
) -> tuple[Decoder, Float[Array, "T D"], Pools]:
    """Run the first ``counts[b]`` tokens of each row, and write their KV into its pages.

    Args:
        pools: K and V pages of each layer.
        lengths: tokens of each row, the new ones included.
        writes: rows whose KV is written; that of the others is in their pages already. None writes
            all.

    Returns:
        The model, the hidden states of the T = B * Q tokens, and the pools.
    """
    step = _step_input(setup, tokens, table, counts, lengths, writes)
    groups = one_group(len(pools[0]))
    operations = PagedOperations(*pools, step, groups, setup.backend, setup.mesh)
    model = nnx.merge(setup.graph, weights)
    hidden = model(step.tokens, step.positions, operations)
    return model, hidden, (operations.k_pages, operations.v_pages)


def _take_pages(
    setup: Setup, state: DecodeState, counts: Int[Array, " B"]
) -> tuple[Int[Array, "B M"], Int[Array, " B"], Bool[Array, " B"], Int[Array, ""]]:
    """Allocate the pages that the new tokens need.

    Returns:
        The page table, the counts (0 for rows that do not fit), whether each row fits, and the
        number of pages allocated so far.
    """
    S, P = setup.page_size, state.num_pages
    held = -(-state.lengths // S)
    wanted = -(-(state.lengths + counts) // S)
    short = state.lengths + counts <= setup.max_context
    whole = jnp.all(state.page_table < P, axis=1)  # fork marks a row that does not fit by page P
    need = jnp.where(short & whole, wanted - held, 0)
    end = state.pages_used + jnp.cumsum(need, dtype=jnp.int32)
    fits = short & whole & ((end <= P) | (need == 0))
    column = jnp.arange(state.page_table.shape[1], dtype=jnp.int32)
    is_new = fits[:, None] & (column >= held[:, None]) & (column < wanted[:, None])
    table = jnp.where(is_new, (end - need - held)[:, None] + column, state.page_table)
    used = jnp.max(jnp.where(fits & (need > 0), end, state.pages_used))
    return table, jnp.where(fits, counts, 0), fits | (counts == 0), used


def _step_input(
    setup: Setup,
    tokens: Int[Array, "B Q"],
    table: Int[Array, "B M"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    writes: Bool[Array, " B"] | None,
) -> StepInput:
    """The batch as a ``StepInput`` of the engine's attention, without sampler slots."""
    B, Q = tokens.shape
    S = setup.page_size
    offset = jnp.arange(Q, dtype=jnp.int32)
    position = (lengths - counts)[:, None] + offset
    live = offset < counts[:, None]
    page = jnp.take_along_axis(table, jnp.minimum(position // S, table.shape[1] - 1), axis=1)
    plan = plan_on_device(
        table,
        counts,
        lengths,
        page_size=S,
        shape=setup.plan_shape(B * Q, B),
        sharing=setup.relay,
    )
    written = live if writes is None else live & writes[:, None]
    kv_slots = jnp.where(written, page * S + position % S, -1).ravel()
    nothing = jnp.zeros(B, jnp.int32)
    return StepInput(
        tokens=tokens.ravel(),
        token_slot=jnp.full(B * Q, -1, jnp.int32),
        positions=jnp.where(live, position, -1).ravel(),
        groups=(GroupInput((kv_slots,), (jnp.maximum(table, 0),), None, plan),),
        sample_row=nothing,
        slots=nothing,
        live=nothing,
        table_pages=table.shape[1],
    )
