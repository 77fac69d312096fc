"""Attention work lists: the items (rows, pages, token range) that a kernel computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

type IntArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkList:
    """Items of one tile height. An item attends a run of query rows to a run of KV tokens.

    Item i reads rows ``row_start[i] : row_start[i] + row_count[i]`` of the packed queries and the
    KV tokens at absolute positions ``kv_start[i] : kv_stop[i]`` of the sequence whose page table is
    row ``table_row[i]``. All rows of the item share these pages, so the kernel reads them once.
    A key at position p is visible to a query at position t iff p <= t (and, under a sliding window
    w, p > t - w), so decode, prefill chunks and shared prefixes are the same computation.

    Invariants: ``kv_start`` is a multiple of the page size; ``0 < kv_stop - kv_start <=
    tile_tokens`` for live items; ``0 < row_count <= tile_rows`` for live items; items at index
    ``num_items`` and beyond are padding and hold zeros. Each (row, token) pair visible under the
    causal rule is covered by exactly one item over all lists of a plan.
    """

    row_start: Int[IntArray, " I"]
    row_count: Int[IntArray, " I"]
    table_row: Int[IntArray, " I"]
    kv_start: Int[IntArray, " I"]
    kv_stop: Int[IntArray, " I"]
    num_items: Int[IntArray, ""]
    tile_rows: int = dataclasses.field(metadata={"static": True})
    tile_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Items in the arrays; ``num_items`` of them are live."""
        return self.row_start.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Work lists for one step and how to merge their partial results.

    ``merge_slots[merge_indptr[t] : merge_indptr[t + 1]]`` are the partial results of packed query
    row t. A slot counts rows of partial output over the concatenated lists: list 0 owns slots
    ``item * tile_rows + row``, list 1 starts at ``lists[0].capacity * lists[0].tile_rows``, and so
    on. Slots beyond ``merge_indptr[-1]`` are padding.
    """

    lists: tuple[WorkList, ...]
    merge_indptr: Int[IntArray, " T1"]
    merge_slots: Int[IntArray, " X"]


def merge_destinations(plan: AttentionPlan) -> tuple[Int[Array, " Y"], Int[Array, " T1"]]:
    """(destinations, merge_indptr): the inverse of ``merge_slots``.

    The destination of a slot is its merge entry, or -1 for the only result of its row. Kernels
    write partial results in merge order, and the only result of a row to the output.
    """
    slots = sum(work.capacity * work.tile_rows for work in plan.lists)
    indptr = jnp.asarray(plan.merge_indptr, jnp.int32)
    room = plan.merge_slots.shape[0]
    entries = jnp.arange(room, dtype=jnp.int32)
    single = indptr[1:] - indptr[:-1] == 1
    alone = jnp.zeros(room + 1, bool).at[jnp.where(single, indptr[:-1], room)].set(True)
    target = jnp.where(alone[:-1], -1, entries)
    slot = jnp.where(entries < indptr[-1], jnp.asarray(plan.merge_slots), slots)
    return jnp.zeros(slots, jnp.int32).at[slot].set(target, mode="drop"), indptr
