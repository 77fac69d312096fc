"""Where the states of sequences are, and which of them the rows of a step continue.

A state is kept at the end of a page, for the tokens up to there: it never changes afterwards, so
sequences share it as they share KV. What a sequence has computed since the last page's end is its
*tail*, which belongs to its slot: the keys, values and gates of those tokens, from which the state
at the end of the page is computed once the page is full, and their updates, by which a decode step
attends without computing a state. A decode step therefore reads a state and writes none.

K is the number of key heads here, G that of the value heads which share one, H and Y the lengths of
a key and of a value, S the tokens of a page, W the channels of a key head that the convolution
mixes: a query, a key and G values.
"""

import dataclasses
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

type IntArray = Array | np.ndarray

CARRIED = -2
"""In place of a page: what comes before is in the step itself or in the sequence's slot."""

NO_PAGE = -1
"""In place of a page: nothing comes before, or nothing is written."""


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerStates:
    """The states of one layer.

    Attributes:
        states: the state at the end of each page.
        conv_ends: the last inputs of the convolution in each page, oldest first.
        keys, values: the normalised keys and the values of each slot's tail.
        updates: what each token of the tail adds to the state, times its key.
        gates: log decay and beta of each token of the tail.
        recent: the last inputs of the convolution of each slot, oldest first.
    """

    states: Float32[Array, "P K G H Y"]
    conv_ends: Float[Array, "P C K W"]
    keys: Float[Array, "slots K S H"]
    values: Float[Array, "slots K G S Y"]
    updates: Float[Array, "slots K G S Y"]
    gates: Float32[Array, "slots K G 2 S"]
    recent: Float[Array, "slots C K W"]


class StateRows(NamedTuple):
    """The rows of a step by sequence and by page. Rows of a sequence follow each other.

    The first of a sequence's *items* is what the step computes of the page that the sequence is in,
    each further one what it computes of the next page. Items of a sequence follow each other too.

    Attributes:
        sequence: the sequence of each row; -1 for padding.
        first_row, last_row: rows of each sequence; -1 for padding.
        slot: slot of each sequence.
        conv_page: the page whose end a sequence follows; NO_PAGE at its first token, CARRIED where
            its slot has the inputs before.
        item_row: row of each item's first token.
        item_sequence: sequence of each item; -1 for padding.
        start, stop: tokens of the page that the item computes; those before ``start`` are in the
            tail of the slot.
        read_page: page whose state precedes the item's page; NO_PAGE for none, CARRIED where the
            item before computes it.
        write_page: page that gets the state after a full page; NO_PAGE where it is not kept.
        num_items: how many items there are.
    """

    sequence: Int[IntArray, " T"]
    first_row: Int[IntArray, " B"]
    last_row: Int[IntArray, " B"]
    slot: Int[IntArray, " B"]
    conv_page: Int[IntArray, " B"]
    item_row: Int[IntArray, " I"]
    item_sequence: Int[IntArray, " I"]
    start: Int[IntArray, " I"]
    stop: Int[IntArray, " I"]
    read_page: Int[IntArray, " I"]
    write_page: Int[IntArray, " I"]
    num_items: Int[IntArray, " 1"]


def max_items(rows: int, seqs: int, page_size: int) -> int:
    """Items of a step at most, with at least one row a sequence."""
    return min(rows, seqs + max(0, rows - seqs) // page_size + seqs)


def state_shapes(
    heads: tuple[int, int, int, int],
    *,
    taps: int,
    num_states: int,
    num_slots: int,
    page_size: int,
    dtype: DTypeLike,
) -> LayerStates:
    """Shapes and dtypes of the states of one layer.

    Args:
        heads: K, H, G and Y: key heads and their dims, values of each and their dims.
        taps: tokens that the convolution mixes.
        num_states: number of state pages.
        num_slots: slots of sequences.
        page_size: tokens a page.
        dtype: dtype of the activations.
    """
    (K, H, G, Y), C, S = heads, taps - 1, page_size
    W = 2 * H + G * Y

    def array(*shape: int, dtype: DTypeLike = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return LayerStates(
        states=array(num_states, K, G, H, Y, dtype=jnp.float32),
        conv_ends=array(num_states, C, K, W),
        keys=array(num_slots, K, S, H),
        values=array(num_slots, K, G, S, Y),
        updates=array(num_slots, K, G, S, Y),
        gates=array(num_slots, K, G, 2, S, dtype=jnp.float32),
        recent=array(num_slots, C, K, W),
    )


def one_sequence(
    tokens: int,
    *,
    key_heads: int,
    values_a_key: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    dtype: DTypeLike,
    page_size: int = 64,
) -> tuple[LayerStates, StateRows]:
    """(empty states, rows) of a step that computes one whole sequence and keeps no state of it.

    Args:
        tokens: T, at least 1.
        key_heads, values_a_key, key_dim, value_dim: K, G, H and Y.
        taps: X, tokens that the convolution mixes.
        dtype: dtype of queries, keys, values and the inputs of the convolution.
        page_size: S, tokens that are computed at once.
    """
    S = page_size
    shapes = state_shapes(
        (key_heads, key_dim, values_a_key, value_dim),
        taps=taps,
        num_states=1,
        num_slots=1,
        page_size=S,
        dtype=dtype,
    )
    layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    first = np.arange(0, tokens, S, dtype=np.int32)
    items = len(first)
    read_page = np.full(items, CARRIED, np.int32)
    read_page[0] = NO_PAGE
    zero = np.zeros(1, np.int32)
    rows = StateRows(
        sequence=np.zeros(tokens, np.int32),
        first_row=zero,
        last_row=zero + tokens - 1,
        slot=zero,
        conv_page=zero + NO_PAGE,
        item_row=first,
        item_sequence=np.zeros(items, np.int32),
        start=np.zeros(items, np.int32),
        stop=np.minimum(S, tokens - first),
        read_page=read_page,
        write_page=np.full(items, NO_PAGE, np.int32),
        num_items=zero + items,
    )
    return layer, rows
