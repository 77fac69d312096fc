"""The gated delta rule page by page, on Hopper: `intra_chunk`, then `inter_chunk`.

A page's tokens are all computed together, those before the step's from the tail, so that a token's
output and the state at a page's end have the same bits however a prompt is divided into steps. The
state at the end of a page that a decode step completes is computed by the same two kernels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from rjax.pallas_kernels.gated_delta.inter_chunk import inter_chunk
from rjax.pallas_kernels.gated_delta.intra_chunk import intra_chunk, intra_chunk_states
from rjax.pallas_kernels.gated_delta.page_end_states import states_after_pages
from rjax.pallas_kernels.gated_delta.page_rows import PAGE_SIZE
from rjax.pallas_kernels.gated_delta.states import LayerStates, StateRows


def chunk_items(rows: StateRows) -> tuple[Int32[Array, "I 6"], Int32[Array, "B 2"]]:
    """(items, the first item of each sequence and how many it has).

    An item is (row of its first token, start, stop, slot, read_page, write_page); its ``stop`` is 0
    for padding.
    """
    sequence = jnp.asarray(rows.item_sequence, jnp.int32)
    live = sequence >= 0
    slot = jnp.asarray(rows.slot)[jnp.maximum(sequence, 0)]
    stop = jnp.where(live, jnp.asarray(rows.stop), 0)
    pages = rows.read_page, rows.write_page
    items = jnp.stack([jnp.asarray(x) for x in (rows.item_row, rows.start, stop, slot, *pages)], 1)
    belongs = sequence == jnp.arange(len(rows.slot))[:, None]
    runs = jnp.stack([jnp.argmax(belongs, 1), belongs.sum(1)], 1)
    return items.astype(jnp.int32), runs.astype(jnp.int32)


def page_ends(rows: StateRows) -> tuple[Int32[Array, "I 6"], Int32[Array, " 1"]]:
    """(items of a decode step whose page they complete, packed to the front; how many they are)."""
    items, _ = chunk_items(rows)
    ends = (items[:, 2] == PAGE_SIZE) & (items[:, 5] >= 0)
    place = jnp.where(ends, jnp.cumsum(ends) - 1, len(items))
    packed = jnp.zeros_like(items).at[place].set(items, mode="drop")
    return packed, ends.sum(dtype=jnp.int32)[None]


def gated_delta_chunks(
    q: Float[Array, "T K H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    layer: LayerStates,
    rows: StateRows,
) -> tuple[Float[Array, "T K G Y"], LayerStates]:
    """Outputs of the rows, 0 for padding, and the states and tails with the rows added.

    Args:
        q, k, v, layer: bfloat16 or float16, H = Y = 128 and pages of 64 tokens; float32 states.
    """
    items, runs = chunk_items(rows)
    tails = layer.keys, layer.values, layer.gates
    sequence = jnp.asarray(rows.sequence, jnp.int32)
    out, chunks = intra_chunk(items, sequence, q, k, v, decay, beta, *tails)
    return inter_chunk(items, runs, (k, v, decay, beta), out, chunks, layer)


def states_at_page_ends(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K G Y"],
    decay: Float32[Array, "T K G"],
    beta: Float32[Array, "T K G"],
    layer: LayerStates,
    rows: StateRows,
) -> LayerStates:
    """The states with those of the pages that the tokens of a decode step complete.

    The tails may have the tokens or not: the tokens are read from the rows.
    """
    items, count = page_ends(rows)
    tails = layer.keys, layer.values, layer.gates
    chunks = intra_chunk_states(items, count, k, v, decay, beta, *tails)
    return states_after_pages(items, count, chunks, layer)
