"""A step as the layers of each page group see it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from rjax.worker.step_input import StepInput


class GroupView(NamedTuple):
    """A step with the page table of one page group, and its plan as the backend prepared it."""

    step: StepInput
    plan: Any


def group_views(step: StepInput, prepare: Callable[..., Any]) -> tuple[GroupView, ...]:
    """The view of each page group; groups with equal windows share a plan.

    Args:
        step: the batch.
        prepare: maps (plan, positions) to the plan that attention takes.
    """
    first = dataclasses.replace(step, windows=())
    views = [GroupView(first, prepare(step.plan, step.positions))]
    for window in step.windows:
        plan = prepare(window.plan, step.positions)
        tables = window.page_tables(step.page_table.shape[1])
        for table, kv_slots in zip(tables, jnp.asarray(window.kv_slots), strict=True):
            view = dataclasses.replace(first, page_table=table, kv_slots=kv_slots)
            views.append(GroupView(view, plan))
    return tuple(views)
