"""The state of a batch of sequences: KV pages, states, page tables and lengths."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rjax.functional.setup import Setup
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.worker.pages.states import layer_shapes


class Caches(NamedTuple):
    """What the layers keep of the tokens of sequences.

    Attributes:
        k_pages, v_pages: pages of each layer with KV of its own; K and H are those of the layer.
        states: of each layer with states in place of KV. Each slot has a state page, that of the
            same number: the state at the end of the sequence's last full page.
    """

    k_pages: list[Float[Array, "P _ S _"]]
    v_pages: list[Float[Array, "P _ S _"]]
    states: list[LayerStates]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DecodeState:
    """B sequences over one pool of P pages. Donate it when it is replaced.

    Shared pages are full and are not written again. Pages are allocated in order and never freed:
    make a new state for a new batch. Layers with a state in place of KV (gated delta nets) keep
    that of each row in the row's own slot.

    Attributes:
        k_pages, v_pages: one pool per layer with KV of its own.
        page_table: page ids of each row, -1 beyond its last page.
        lengths: tokens of each row whose KV is written.
        pages_used: number of allocated pages.
        states: of each layer with a state for each row in place of KV; empty without such layers.
    """

    k_pages: list[Float[Array, "P _ S _"]]
    v_pages: list[Float[Array, "P _ S _"]]
    page_table: Int[Array, "B M"]
    lengths: Int[Array, " B"]
    pages_used: Int[Array, ""]
    states: list[LayerStates]

    @property
    def caches(self) -> Caches:
        """What the layers keep."""
        return Caches(self.k_pages, self.v_pages, self.states)

    @property
    def num_pages(self) -> int:
        """Number of pages in the pool, P."""
        return self.k_pages[0].shape[0]


def pages_needed(
    setup: Setup, *, prompts: int, prompt_tokens: int, samples: int, new_tokens: int
) -> int:
    """Upper bound on the pages of ``samples`` sequences per prompt.

    Args:
        setup: the model's static part, from ``prepare``.
        prompts: number of prompts.
        prompt_tokens: length of the longest prompt.
        samples: sequences per prompt.
        new_tokens: most generated tokens per sequence.
    """
    S = setup.page_size
    unique = math.ceil((S - 1 + new_tokens) / S)
    return prompts * (math.ceil(prompt_tokens / S) + samples * unique)


def make_caches(setup: Setup, *, num_pages: int, num_slots: int, dtype: DTypeLike) -> Caches:
    """Empty caches of ``num_pages`` pages and ``num_slots`` slots of states.

    Arrays of one shape start as ones or as zeros, since a caller's program may make them and a
    kernel writes both: see `mosaic.emit`, "Arrays that a kernel writes".
    """
    shapes = [(num_pages, K, setup.page_size, H) for K, H in setup.pool_heads]
    k_pages = [jnp.zeros(shape, dtype) for shape in shapes]
    v_pages = [jnp.ones(shape, dtype) for shape in shapes]
    linear = setup.config.linear
    if linear is None:
        return Caches(k_pages, v_pages, [])
    of_layer = layer_shapes(
        linear,
        num_states=num_slots,
        num_slots=num_slots,
        page_size=setup.page_size,
        dtype=jnp.dtype(dtype),
    )

    def empty() -> LayerStates:
        layer = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), of_layer)
        updates, recent = jnp.ones_like(layer.updates), jnp.ones_like(layer.recent)
        return dataclasses.replace(layer, updates=updates, recent=recent)

    return Caches(k_pages, v_pages, [empty() for _ in range(sum(linear.layers))])


def make_state(setup: Setup, *, batch: int, num_pages: int, dtype: DTypeLike) -> DecodeState:
    """An empty state of ``batch`` rows; ``dtype`` of the KV is that of the weights."""
    caches = make_caches(setup, num_pages=num_pages, num_slots=batch, dtype=dtype)
    return DecodeState(
        **caches._asdict(),
        page_table=jnp.full((batch, setup.table_pages), -1, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        pages_used=jnp.zeros((), jnp.int32),
    )


def fork(setup: Setup, state: DecodeState, parents: Int[Array, " C"]) -> DecodeState:
    """A state of C rows, row c a copy of row ``parents[c]``: n samples of a prompt, or a beam.

    Full pages are shared. A partial page is copied for every row, because each row appends to it,
    and so are the states of layers that have them in place of KV. Keep the rows of one parent
    adjacent: adjacent rows share KV reads. If the pool has no page left for a row's copy, that row
    is marked full and gets NaN logits; see ``prefill``.
    """
    S, P = setup.page_size, state.num_pages
    lengths, table = state.lengths[parents], state.page_table[parents]
    partial = lengths % S != 0
    column = jnp.minimum(lengths // S, table.shape[1] - 1)
    old = jnp.take_along_axis(table, column[:, None], axis=1)[:, 0]
    new = state.pages_used + jnp.cumsum(partial, dtype=jnp.int32) - 1
    fits = partial & (new < P)
    # A row without room loses its partial page and is marked full.
    row = jnp.arange(lengths.shape[0])
    table = table.at[row, column].set(
        jnp.where(fits, new, jnp.where(partial, P, table[row, column]))
    )
    source = jnp.where(fits, old, 0)
    target = jnp.where(fits, new, P)

    def copied(pool: Float[Array, "P K S H"]) -> Float[Array, "P K S H"]:
        return pool.at[target].set(pool[source], mode="drop")

    return DecodeState(
        k_pages=[copied(pool) for pool in state.k_pages],
        v_pages=[copied(pool) for pool in state.v_pages],
        page_table=table,
        lengths=lengths,
        pages_used=state.pages_used + jnp.sum(fits, dtype=jnp.int32),
        states=jax.tree.map(lambda slots: slots[parents], state.states),
    )
