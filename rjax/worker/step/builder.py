"""The packed input of each step: built anew, or from the step before where only lengths differ.

To plan attention is most of the host's work for a step, and a decode step of a small model takes
the device less time than that. From one decode step to the next each sequence grows by a token, and
a plan stays as it is but for the ends of its last items, until a sequence begins a KV split or its
window leaves one. With many sequences nearly every step has such a sequence; where splits are
coalesced anyway, their last items then grow into the next split for a few steps.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.plan.host import PlanShape, PlanStats, Sharing
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.worker.step.batch_order import by_shared_pages
from rjax.worker.step.input import StepInput
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.prepare import build_step_input, check_step_input, mean_stats, write_group
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state_rows import write_state_rows

COALESCED_STEPS = 16
"""Steps that a plan for many sequences serves at least where splits are coalesced, unless a window
leaves an item before. Their last items grow by fewer tokens than this into the next split."""


@dataclasses.dataclass(frozen=True, slots=True)
class OrderedInput:
    """A step's input.

    Attributes:
        batch: the scheduled sequences in the order of the step.
        packed: the input as `PackedLayout.pack` packs it; nothing writes it later.
        stats: what the step's attention reads.
    """

    batch: list[ScheduledSequence]
    packed: Int[np.ndarray, " Z"]
    stats: PlanStats


@dataclasses.dataclass(frozen=True, slots=True)
class _DecodeStep:
    """A decode step, which the next one may follow.

    Attributes:
        shape: the step's shape.
        scheduled: the step's batch as it was scheduled.
        order: index in ``scheduled`` of each sequence of the step.
        stops: length of each sequence of the step.
        growing: the single-row items of each plan that end where their sequence does.
        more_steps: number of decode steps that the plans serve after this one.
        stats: what each plan reads.
        made: the input.
    """

    shape: StepShape
    scheduled: list[ScheduledSequence]
    order: list[int]
    stops: Int[np.ndarray, " A"]
    growing: list[Int[np.ndarray, " X"]]
    more_steps: int
    stats: tuple[PlanStats, ...]
    made: OrderedInput

    @classmethod
    def of(
        cls,
        scheduled: list[ScheduledSequence],
        step_input: StepInput,
        shape: StepShape,
        stats: tuple[PlanStats, ...],
        made: OrderedInput,
    ) -> "_DecodeStep | None":
        """The step, if it only decodes."""
        if not all([item.samples and item.stop == item.start + 1 for item in scheduled]):
            return None
        place = {id(item.sequence): i for i, item in enumerate(scheduled)}
        stops = np.fromiter([item.stop for item in made.batch], np.int32, len(scheduled))
        growing = [_growing_items(plan, stops) for plan in step_input.plans]
        more_steps = [
            _more_steps(*found, stops)
            for found in zip(shape.plans, step_input.plans, growing, strict=True)
        ]
        return cls(
            shape=shape,
            scheduled=scheduled,
            order=[place[id(item.sequence)] for item in made.batch],
            stops=stops,
            growing=growing,
            more_steps=min(more_steps),
            stats=stats,
            made=made,
        )

    def is_followed_by(self, batch: list[ScheduledSequence], shape: StepShape) -> bool:
        """Whether its plans serve a batch: the same sequences, each with its next token."""
        if not self.more_steps or len(batch) != len(self.scheduled) or shape != self.shape:
            return False
        for (sequence, start, stop, samples, stored), before in zip(
            batch, self.scheduled, strict=True
        ):
            if sequence is not before.sequence or start != before.stop or stop != start + 1:
                return False
            if not samples or stored > start:
                return False
        return True


def _growing_items(plan: AttentionPlan, stops: Int[np.ndarray, " A"]) -> Int[np.ndarray, " X"]:
    """The single-row items of a plan that end where their sequence does."""
    single_row = plan.lists[0]
    live = slice(int(single_row.num_items))
    lengths = stops[np.asarray(single_row.table_row)[live]]
    return np.flatnonzero(np.asarray(single_row.kv_stop)[live] == lengths)


def _more_steps(
    shape: PlanShape,
    plan: AttentionPlan,
    growing: Int[np.ndarray, " X"],
    stops: Int[np.ndarray, " A"],
) -> int:
    """Decode steps that a plan serves after its own, in which sequences have lengths ``stops``."""
    if not stops.size:
        return 0
    split, window = shape.kv_split_size, shape.window
    position = stops - 1
    steps = split - 1 - int((position % split).max())
    first_seen = None if window is None else position - window + 1
    if first_seen is not None:
        edge = np.where(first_seen < 0, first_seen, first_seen % split)
        steps = min(steps, split - 1 - int(edge.max()))
    # Few sequences seldom begin a split, and the plan of one alone stays that of its length.
    few = stops.size * COALESCED_STEPS < split
    if few or shape.split_policy is None or growing.size < stops.size:
        return steps
    coalesced = COALESCED_STEPS - 1
    if first_seen is not None:
        coalesced = min(coalesced, _steps_in_sight(plan, growing, first_seen))
    return max(steps, coalesced)


def _steps_in_sight(
    plan: AttentionPlan, growing: Int[np.ndarray, " X"], first_seen: Int[np.ndarray, " A"]
) -> int:
    """Decode steps until a row's window leaves an item behind."""
    steps = []
    padded = np.append(first_seen, 0)
    for number, items in enumerate(plan.lists):
        live = np.arange(int(items.num_items))
        if number == 0:
            live = np.setdiff1d(live, growing)
        start = np.asarray(items.row_start)[live]
        runs = np.stack([start, start + np.asarray(items.row_count)[live]], axis=1)
        furthest = np.maximum.reduceat(padded, runs.ravel())[::2]
        steps.append(np.asarray(items.kv_stop)[live] - 1 - furthest)
    return int(np.concatenate(steps).min(initial=COALESCED_STEPS))  # of no item


class StepInputBuilder:
    """Makes the input of one step after the other.

    Args:
        layouts: layouts of the packed inputs, by step shape.
        sharing: which shared pages attention reads once.
        num_pages: number of pages of the KV pool, to check each input against; None checks nothing.

    Attributes:
        sharing: which shared pages attention reads once.
    """

    def __init__(
        self, layouts: PackedLayouts, sharing: Sharing, num_pages: int | None = None
    ) -> None:
        self._layouts, self._num_pages = layouts, num_pages
        self.sharing: Sharing = sharing
        self._last: _DecodeStep | None = None

    def build(
        self,
        batch: list[ScheduledSequence],
        tables: Int[np.ndarray, "groups slots pages"],
        shape: StepShape,
    ) -> OrderedInput:
        """The input of the next step.

        Args:
            batch: the scheduled sequences in any order; in the result, sequences with the same
                pages are neighbours.
            tables: page table of each page group; row s lists the pages of the sequence in slot s.
            shape: shapes of the compiled step.

        Raises:
            ValueError: the input does not fit the pool, if that is checked.
        """
        if self._last is not None and self._last.is_followed_by(batch, shape):
            self._last = self._follow(self._last, batch, tables)
            return self._last.made
        ordered = by_shared_pages(
            batch, tables[0], page_size=shape.page_size, kv_split=shape.kv_split_size
        )
        step_input, stats = build_step_input(ordered, tables, shape, self.sharing)
        self._check(step_input, ordered, shape)
        packed = self._layouts[shape].pack(step_input)
        made = OrderedInput(ordered, packed, mean_stats(stats, shape.groups))
        self._last = _DecodeStep.of(batch, step_input, shape, stats, made)
        return made

    def _follow(
        self, last: _DecodeStep, batch: list[ScheduledSequence], tables: np.ndarray
    ) -> _DecodeStep:
        """The step after ``last``."""
        shape, A = last.shape, len(batch)
        ordered = [batch[i] for i in last.order]
        sequences = [item.sequence for item in ordered]
        slots = np.fromiter([s.slot for s in sequences], np.int32, A)
        known = np.fromiter([s.num_known for s in sequences], np.int32, A)
        positions, stops = last.stops, last.stops + 1
        packed = last.made.packed.copy()
        fields = self._layouts[shape].unpack(packed)  # views
        fields.slots[:A] = slots
        fields.positions[:A] = positions
        fields.token_slot[:A] = np.where(stops > known, slots, -1)
        fields.tokens[:A] = 0
        for b in np.flatnonzero(stops <= known).tolist():
            [fields.tokens[b]] = sequences[b].tokens(ordered[b].start, ordered[b].stop)
        for group, kind, growing in zip(fields.groups, shape.kinds, last.growing, strict=True):
            write_group(
                group,
                kind,
                tables,
                page_size=shape.page_size,
                slots=slots,
                start=positions,
                row_slots=slots,
                positions=positions,
            )
            group.plan.lists[0].kv_stop[growing] += 1
        if fields.states is not None:
            write_state_rows(
                fields.states,
                tables[-1],
                page_size=shape.page_size,
                slots=slots,
                start=positions,
                stop=stops,
            )
        self._check(fields, ordered, shape)
        stats = tuple(
            [
                PlanStats(
                    kv_tokens_read=before.kv_tokens_read + growing.size,
                    kv_tokens_unshared=before.kv_tokens_unshared + A,
                    shared_groups=before.shared_groups,
                )
                for before, growing in zip(last.stats, last.growing, strict=True)
            ]
        )
        made = OrderedInput(ordered, packed, mean_stats(stats, shape.groups))
        return dataclasses.replace(
            last,
            scheduled=batch,
            stops=stops,
            more_steps=last.more_steps - 1,
            stats=stats,
            made=made,
        )

    def _check(
        self, step_input: StepInput, batch: list[ScheduledSequence], shape: StepShape
    ) -> None:
        if self._num_pages is not None:
            check_step_input(step_input, batch, num_pages=self._num_pages, shape=shape)
