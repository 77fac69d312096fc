"""The rows of a step as layers with states take them, made on the device."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from rjax.pallas_kernels.gated_delta.states import CARRIED, NO_PAGE, StateRows


def state_rows(
    slots: Int[Array, " B"],
    counts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    tokens_a_row: int,
    page_size: int,
) -> StateRows:
    """A step of B sequences with Q rows each, of which the first ``counts[b]`` are live.

    Every slot has one state page, of its own number, which holds the state at the end of the last
    full page of the slot's sequence. A step reads it before it writes it.

    Args:
        slots: slot of each sequence.
        counts: live rows of each sequence, 0 to Q.
        lengths: tokens of each sequence, these included.
        tokens_a_row: Q. With 1 there are as many items as sequences: the step decodes.
        page_size: tokens a page, S.
    """
    (B,), Q, S = slots.shape, tokens_a_row, page_size
    first_row = jnp.arange(B, dtype=jnp.int32) * Q
    start = lengths - counts
    before = jnp.where(start >= S, slots, NO_PAGE)
    number = jnp.arange((Q + S - 2) // S + 1, dtype=jnp.int32)
    page = (start // S)[:, None] + number
    item_start = jnp.maximum(start[:, None] - page * S, 0)
    item_stop = jnp.minimum(lengths[:, None] - page * S, S)
    live = item_start < item_stop
    is_last = page == (lengths // S - 1)[:, None]  # full page: the one whose state is kept
    sequence = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], live.shape)
    row = jnp.arange(Q, dtype=jnp.int32)

    def items(value: Int[Array, "B X"], unused: int) -> Int[Array, " I"]:
        return jnp.where(live, value, unused).ravel()

    return StateRows(
        sequence=jnp.where(row < counts[:, None], sequence[:, :1], -1).ravel(),
        first_row=jnp.where(counts > 0, first_row, -1),
        last_row=jnp.where(counts > 0, first_row + counts - 1, -1),
        slot=slots,
        conv_page=jnp.where(start % S, CARRIED, before),
        item_row=items((first_row - start)[:, None] + page * S + item_start, 0),
        item_sequence=items(sequence, -1),
        start=items(item_start, 0),
        stop=items(item_stop, 0),
        read_page=items(jnp.where(number > 0, CARRIED, before[:, None]), NO_PAGE),
        write_page=items(jnp.where(is_last, slots[:, None], NO_PAGE), NO_PAGE),
        num_items=jnp.sum(live, dtype=jnp.int32)[None],
    )
