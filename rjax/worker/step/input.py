"""The input of a step."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.gated_delta.states import StateRows

type IntArray = Array | np.ndarray


class GroupInput(NamedTuple):
    """The pages and the attention plan of the page groups of one kind.

    Attributes:
        kv_slots: KV index of each row, page * S + offset; -1 for padding and for stored KV. One
            array a group.
        pages: R page ids of each sequence, from ``first_page`` on. One array a group.
        first_page: number of the first page that the step reaches in each sequence; None if each
            begins with page 0, and R is the width of the page table.
        plan: the attention work lists, the same for all groups.
    """

    kv_slots: tuple[Int[IntArray, " T"], ...]
    pages: tuple[Int[IntArray, "B R"], ...]
    first_page: Int[IntArray, " B"] | None
    plan: AttentionPlan

    def page_tables(self, table_pages: int) -> tuple[Int[IntArray, "B M"], ...]:
        """Tables of ``table_pages`` pages; entries before the first page repeat it.

        Attention may read those at the edge of a window, where it masks them: they must hold KV.
        """
        if self.first_page is None:
            return self.pages
        column = jnp.arange(table_pages) - jnp.asarray(self.first_page)[:, None]
        column = jnp.clip(column, 0, self.pages[0].shape[1] - 1)
        return tuple(
            [jnp.take_along_axis(jnp.asarray(pages), column, axis=1) for pages in self.pages]
        )


class GroupView(NamedTuple):
    """The rows of a step and the pages of one page group.

    Attributes:
        positions: position of each row in its sequence; -1 for padding.
        kv_slots: KV index of each row, as in `GroupInput`.
        page_table: page ids of each sequence.
    """

    positions: Int[IntArray, " T"]
    kv_slots: Int[IntArray, " T"]
    page_table: Int[IntArray, "B M"]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's batch: T packed token rows of B sequences, padded.

    Its leaves are in the order of the fields, but the plans follow all other arrays.

    Attributes:
        tokens: token ids known to the host; 0 in rows with a ``token_slot``.
        token_slot: sampler slot whose last token, still on the device, is this row's; -1 for none.
        positions: position of each row in its sequence; -1 for padding.
        groups: the input of each kind of page group, as `StepShape.kinds` lists them.
        sample_row: the row whose logits give each sequence's next token.
        slots: sampler slot of each sequence.
        live: 1 where the sequence samples a token in this step.
        table_pages: M, the width of a page table.
        states: the rows as layers with states take them; None for a model without such layers.
    """

    tokens: Int[IntArray, " T"]
    token_slot: Int[IntArray, " T"]
    positions: Int[IntArray, " T"]
    groups: tuple[GroupInput, ...]
    sample_row: Int[IntArray, " B"]
    slots: Int[IntArray, " B"]
    live: Int[IntArray, " B"]
    table_pages: int
    states: StateRows | None = None

    @property
    def plans(self) -> tuple[AttentionPlan, ...]:
        """The attention plan of each kind of page group."""
        return tuple([group.plan for group in self.groups])

    def views(self) -> tuple[GroupView, ...]:
        """The step as the layers of each page group see it."""
        return tuple(
            [
                GroupView(self.positions, kv_slots, table)
                for group in self.groups
                for kv_slots, table in zip(
                    group.kv_slots, group.page_tables(self.table_pages), strict=True
                )
            ]
        )

    def tree_flatten(self) -> tuple[tuple[Any, ...], int]:
        """(the arrays, the width of a page table)."""
        rows = self.tokens, self.token_slot, self.positions
        pages = tuple([group[:-1] for group in self.groups])
        sequences = self.sample_row, self.slots, self.live, self.states
        return (*rows, pages, *sequences, self.plans), self.table_pages

    @classmethod
    def tree_unflatten(cls, table_pages: int, arrays: tuple[Any, ...]) -> "StepInput":
        """The inverse of ``tree_flatten``."""
        tokens, token_slot, positions, pages, sample_row, slots, live, states, plans = arrays
        groups = tuple(
            [
                GroupInput(kv_slots, page_ids, first_page, plan)
                for (kv_slots, page_ids, first_page), plan in zip(pages, plans, strict=True)
            ]
        )
        rows, sequences = (tokens, token_slot, positions), (sample_row, slots, live)
        return cls(*rows, groups, *sequences, table_pages=table_pages, states=states)
