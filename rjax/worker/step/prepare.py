"""The input of a step, prepared from its batch."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int

from rjax.batch.page_groups import GroupKind, PageGroups, first_page
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.plan.check import check_values, check_writes
from rjax.pallas_kernels.attention.plan.host import PlanStats, Sharing, plan_attention
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.gated_delta.states import StateRows
from rjax.worker.step.input import GroupInput, StepInput
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state_rows import empty_state_rows, write_state_rows


class PromptTargets(NamedTuple):
    """The prompt token that follows each row of a step and what divides the row's logits; 0 and 1
    where no prompt logprobs are wanted."""

    tokens: Int[np.ndarray, " T"]
    temperatures: Float32[np.ndarray, " T"]


def build_step_input(
    batch: list[ScheduledSequence],
    tables: Int[np.ndarray, "groups slots pages"],
    shape: StepShape,
    sharing: Sharing,
) -> tuple[StepInput, tuple[PlanStats, ...]]:
    """Build the input of a step of this shape from a batch, in its order.

    Args:
        batch: the running sequences.
        tables: page table of each page group, and that of the states; row s lists the pages of the
            sequence in slot s. Entries of pages that it does not hold are ignored.
        shape: shapes of the compiled step.
        sharing: which shared pages attention reads once.

    Returns:
        The input, and what each of its plans reads, in the order of ``shape.kinds``.
    """
    A, S = len(batch), shape.page_size
    sequences, *columns = zip(*batch, strict=True) if batch else [()] * 5
    start, stop, samples, stored = (np.fromiter(column, np.int32, A) for column in columns)
    slots = np.fromiter([s.slot for s in sequences], np.int32, A)
    query_start = np.zeros(A + 1, np.int32)
    np.cumsum(stop - start, out=query_start[1:])
    T = int(query_start[-1])
    of_row = np.repeat(np.arange(A), stop - start)
    positions = np.arange(T, dtype=np.int32) + (start - query_start[:-1])[of_row]
    stored_rows = positions < stored[of_row]
    known = np.fromiter([s.num_known for s in sequences], np.int32, A)
    unknown = stop > known  # the last token of a sequence may still be on the device
    token_slot = np.full(shape.rows, -1, np.int32)
    token_slot[query_start[1:][unknown] - 1] = slots[unknown]
    tokens = _tokens(batch, np.flatnonzero(start < known), query_start, shape.rows)
    groups, stats = [], []
    for kind, plan_shape in zip(shape.kinds, shape.plans, strict=True):
        plan, of_plan = plan_attention(
            tables[kind.first : kind.stop],
            query_start,
            stop,
            page_size=S,
            shape=plan_shape,
            sharing=sharing,
            table_rows=slots,
        )
        group = _empty_group(kind, shape, plan)
        write_group(
            group,
            kind,
            tables,
            page_size=S,
            slots=slots,
            start=start,
            row_slots=slots[of_row],
            positions=positions,
        )
        for kv_slots in group.kv_slots:
            kv_slots[:T][stored_rows] = -1
        groups.append(group)
        stats.append(of_plan)
    step_input = StepInput(
        tokens=tokens,
        token_slot=token_slot,
        positions=_padded(positions, shape.rows, -1),
        groups=tuple(groups),
        sample_row=_padded(query_start[1:] - 1, shape.seqs, 0),
        slots=_padded(slots, shape.seqs, 0),
        live=_padded(samples, shape.seqs, 0),
        table_pages=shape.table_pages,
        states=_state_rows(tables, shape, slots, start, stop),
    )
    return step_input, tuple(stats)


def empty_input(shape: StepShape) -> StepInput:
    """The input of a step without sequences."""
    tables = np.zeros((shape.groups.num_tables, 1, shape.table_pages), np.int32)
    empty, _ = build_step_input([], tables, shape, "off")
    return empty


def mean_stats(stats: tuple[PlanStats, ...], groups: PageGroups) -> PlanStats:
    """What all layers read, divided by their number; ``stats`` are those of each plan."""
    layers = [groups.layers_of(kind.window) for kind in groups.kinds]

    def mean(values: list[int]) -> int:
        return sum(n * value for n, value in zip(layers, values, strict=True)) // sum(layers)

    return PlanStats(
        kv_tokens_read=mean([found.kv_tokens_read for found in stats]),
        kv_tokens_unshared=mean([found.kv_tokens_unshared for found in stats]),
        shared_groups=sum(found.shared_groups for found in stats),
    )


def write_group(
    group: GroupInput,
    kind: GroupKind,
    tables: Int[np.ndarray, "groups slots pages"],
    *,
    page_size: int,
    slots: Int[np.ndarray, " A"],
    start: Int[np.ndarray, " A"],
    row_slots: Int[np.ndarray, " T"],
    positions: Int[np.ndarray, " T"],
) -> None:
    """Write pages and KV indices of a step into the host's arrays for a kind of page group.

    Args:
        group: the arrays.
        kind: its page groups.
        tables: page table of each page group, as in `build_step_input`.
        page_size: tokens a page.
        slots: slot of each sequence.
        start: position of the first row of each sequence.
        row_slots: slot of each row's sequence.
        positions: position of each row.
    """
    tables = tables[kind.first : kind.stop]
    if group.first_page is None:
        pages = tables[:, slots]
    else:
        first = [first_page(position, kind.window, page_size) for position in start.tolist()]
        group.first_page[: slots.size] = first
        columns = np.add.outer(np.asarray(first, np.int32), np.arange(group.pages[0].shape[1]))
        pages = tables[:, slots[:, None], np.minimum(columns, tables.shape[2] - 1)]
    kv_slots = tables[:, row_slots, positions // page_size] * page_size + positions % page_size
    for mine, of_group in zip(group.pages, pages, strict=True):
        mine[: slots.size] = of_group
    for mine, of_group in zip(group.kv_slots, kv_slots, strict=True):
        mine[: positions.size] = of_group


def check_step_input(
    step_input: StepInput, batch: list[ScheduledSequence], *, num_pages: int, shape: StepShape
) -> None:
    """Check a step's page tables, positions, writes and attention plan against each other.

    Raises:
        ValueError: they are inconsistent.
    """
    rows = [item.stop - item.start for item in batch]
    owners = np.repeat(np.arange(len(batch)), rows).astype(np.int32)
    owners = _padded(owners, step_input.positions.shape[0], 0)
    for group, kind in zip(step_input.groups, shape.kinds, strict=True):
        tables = group.page_tables(shape.table_pages)
        for table, kv_slots in zip(tables, group.kv_slots, strict=True):
            check_values(
                np.asarray(table),
                step_input.positions,
                group.plan,
                num_pages=num_pages,
                page_size=shape.page_size,
                sequence_of_row=owners,
                sliding_window=kind.window,
            )
            check_writes(kv_slots, num_pages=num_pages, page_size=shape.page_size)


def _state_rows(
    tables: Int[np.ndarray, "groups slots pages"],
    shape: StepShape,
    slots: Int[np.ndarray, " A"],
    start: Int[np.ndarray, " A"],
    stop: Int[np.ndarray, " A"],
) -> StateRows | None:
    if not shape.groups.num_state_layers:
        return None
    found = empty_state_rows(
        rows=shape.rows,
        seqs=shape.seqs,
        page_size=shape.page_size,
        one_row_each=shape.one_row_each,
    )
    write_state_rows(
        found, tables[-1], page_size=shape.page_size, slots=slots, start=start, stop=stop
    )
    return found


def _empty_group(kind: GroupKind, shape: StepShape, plan: AttentionPlan) -> GroupInput:
    groups = range(kind.first, kind.stop)
    size = shape.seqs, shape.pages_reached(kind.window)
    return GroupInput(
        kv_slots=tuple([np.full(shape.rows, -1, np.int32) for _ in groups]),
        pages=tuple([np.zeros(size, np.int32) for _ in groups]),
        first_page=None if kind.window is None else np.zeros(shape.seqs, np.int32),
        plan=plan,
    )


def _padded(values: np.ndarray, size: int, fill: int) -> Int[np.ndarray, " size"]:
    out = np.full(size, fill, np.int32)
    out[: values.size] = values
    return out


def _tokens(
    batch: list[ScheduledSequence],
    members: Int[np.ndarray, " X"],
    query_start: Int[np.ndarray, " A1"],
    rows: int,
) -> Int[np.ndarray, " T"]:
    """Tokens of all rows; only ``members`` have tokens known to the host."""
    tokens = np.zeros(rows, np.int32)
    for b in members.tolist():
        sequence, start, stop, _, _ = batch[b]
        row = query_start[b]
        ids = sequence.token_array(start, min(stop, sequence.num_known))
        tokens[row : row + len(ids)] = ids
    return tokens


def prompt_targets(batch: list[ScheduledSequence], rows: int) -> PromptTargets:
    """Which prompt logprobs the rows of a step give.

    Args:
        batch: the scheduled sequences in the order of the step.
        rows: number of token rows in the step, T.
    """
    found, row = PromptTargets(np.zeros(rows, np.int32), np.ones(rows, np.float32)), 0
    for sequence, start, stop, _, _ in batch:
        if sequence.params.prompt_logprobs is not None:
            following = sequence.prompt_array[start + 1 : stop + 1]
            found.tokens[row : row + len(following)] = following
            found.temperatures[row : row + len(following)] = sequence.prompt_temperature
        row += stop - start
    return found
