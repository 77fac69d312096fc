"""The state of a batch of sequences: KV pages, page tables and lengths."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rjax.functional.setup import Setup

type Pools = tuple[list[Float[Array, "P K S H"]], list[Float[Array, "P K S H"]]]
"""K and V pages, one array of each per layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class DecodeState:
    """B sequences over one pool of P pages. Donate it when it is replaced.

    Shared pages are full and are not written again. Pages are allocated in order and never freed:
    make a new state for a new batch.

    Attributes:
        k_pages, v_pages: one pool per layer.
        page_table: page ids of each row, -1 beyond its last page.
        lengths: tokens of each row whose KV is written.
        pages_used: number of allocated pages.
    """

    k_pages: list[Float[Array, "P K S H"]]
    v_pages: list[Float[Array, "P K S H"]]
    page_table: Int[Array, "B M"]
    lengths: Int[Array, " B"]
    pages_used: Int[Array, ""]

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


def make_pools(setup: Setup, num_pages: int, dtype: DTypeLike) -> Pools:
    """K and V pages of each layer.

    Values start as ones and keys as zeros, since a caller's program may make the pools and a kernel
    writes both: see `mosaic.emit`, "Arrays that a kernel writes".
    """
    config = setup.config
    shape = (num_pages, config.num_kv_heads, setup.page_size, config.head_dim)
    k_pages = [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
    return k_pages, [jnp.ones(shape, dtype) for _ in range(config.num_layers)]


def make_state(setup: Setup, *, batch: int, num_pages: int, dtype: DTypeLike) -> DecodeState:
    """An empty state of ``batch`` rows; ``dtype`` of the KV is that of the weights."""
    k_pages, v_pages = make_pools(setup, num_pages, dtype)
    return DecodeState(
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=jnp.full((batch, setup.table_pages), -1, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        pages_used=jnp.zeros((), jnp.int32),
    )


def fork(setup: Setup, state: DecodeState, parents: Int[Array, " C"]) -> DecodeState:
    """A state of C rows, row c a copy of row ``parents[c]``: n samples of a prompt, or a beam.

    Full pages are shared. A partial page is copied for every row, because each row appends to it.
    Keep the rows of one parent adjacent: adjacent rows share KV reads. If the pool has no page left
    for a row's copy, that row is marked full and gets NaN logits; see ``prefill``.
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
    )
