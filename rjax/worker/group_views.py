"""A step as the layers of each page group see it."""

from typing import NamedTuple

from jaxtyping import Int

from rjax.worker.step_input import IntArray, StepInput


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


def group_views(step: StepInput) -> tuple[GroupView, ...]:
    """The view of each page group."""
    return tuple(
        [
            GroupView(step.positions, kv_slots, table)
            for group in step.groups
            for kv_slots, table in zip(
                group.kv_slots, group.page_tables(step.table_pages), strict=True
            )
        ]
    )
