"""Run tokens through the model and keep their KV: prompts, chunks of prompts, single tokens."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from rjax.functional.setup import Setup
from rjax.functional.state import Caches, DecodeState
from rjax.functional.state_rows import state_rows
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
    slots = jnp.arange(B, dtype=jnp.int32)
    model, hidden, caches = forward(
        setup, weights, state.caches, tokens, table, counts, lengths, slots
    )
    last = jnp.arange(B) * Q + jnp.maximum(counts - 1, 0)
    logits = jnp.where(fits[:, None], model.logits(hidden[last]), jnp.nan)
    new = DecodeState(
        **caches._asdict(),
        page_table=table,
        lengths=lengths,
        pages_used=used,
    )
    return new, logits


def forward(
    setup: Setup,
    weights: Any,
    caches: Caches,
    tokens: Int[Array, "B Q"],
    table: Int[Array, "B M"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"],
    writes: Bool[Array, " B"] | None = None,
    prefixes: Int[Array, " B"] | None = None,
) -> tuple[Decoder, Float[Array, "T D"], Caches]:
    """Run the first ``counts[b]`` tokens of each row, and write their KV into its pages.

    Args:
        caches: what the layers keep of the tokens before.
        lengths: tokens of each row, the new ones included.
        slots: slot of each row's states, which differ where rows have tokens. Layers with states
            continue that of the slot, or begin one where a row has no token before.
        writes: rows whose KV is written; that of the others is in their pages already. None writes
            all. States are of all tokens.
        prefixes: tokens of each row's prefix, which other rows may share; a multiple of the page
            size. Only for steps of one token a row. None shares whole KV splits only.

    Returns:
        The model, the hidden states of the T = B * Q tokens, and the caches.
    """
    step = _step_input(setup, tokens, table, counts, lengths, slots, writes, prefixes)
    operations = PagedOperations(
        caches.k_pages,
        caches.v_pages,
        step,
        setup.groups,
        setup.backend,
        setup.mesh,
        states=caches.states,
    )
    model = nnx.merge(setup.graph, weights)
    hidden = model(step.tokens, step.positions, operations)
    return model, hidden, Caches(operations.k_pages, operations.v_pages, operations.states)


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
    slots: Int[Array, " B"],
    writes: Bool[Array, " B"] | None,
    prefixes: Int[Array, " B"] | None,
) -> StepInput:
    """The batch as a ``StepInput`` of the engine's attention, without sampler slots."""
    B, Q = tokens.shape
    S = setup.page_size
    offset = jnp.arange(Q, dtype=jnp.int32)
    position = (lengths - counts)[:, None] + offset
    live = offset < counts[:, None]
    page = jnp.take_along_axis(table, jnp.minimum(position // S, table.shape[1] - 1), axis=1)
    plans = [
        plan_on_device(
            table,
            counts,
            lengths,
            page_size=S,
            shape=setup.plan_shape(B * Q, B, kind.window, prefixes=prefixes is not None),
            sharing=setup.relay,
            prefix_len=prefixes,
        )
        for kind in setup.groups.kinds
    ]
    written = live if writes is None else live & writes[:, None]
    kv_slots = jnp.where(written, page * S + position % S, -1).ravel()
    nothing = jnp.zeros(B, jnp.int32)
    return StepInput(
        tokens=tokens.ravel(),
        token_slot=jnp.full(B * Q, -1, jnp.int32),
        positions=jnp.where(live, position, -1).ravel(),
        groups=tuple(
            [GroupInput((kv_slots,), (jnp.maximum(table, 0),), None, plan) for plan in plans]
        ),
        sample_row=nothing,
        slots=nothing,
        live=nothing,
        table_pages=table.shape[1],
        states=None
        if setup.config.linear is None
        else state_rows(slots, counts, lengths, tokens_a_row=Q, page_size=S),
    )
