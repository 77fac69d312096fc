"""The input of a step, packed into one array that reaches the device in one transfer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rjax.batch.page_groups import PageGroups, first_page
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.plan.check import check_values, check_writes
from rjax.pallas_kernels.attention.plan.host import PlanStats, Sharing, plan_attention
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.worker.step_shape import StepShape

type IntArray = Array | np.ndarray

_ALIGNMENT = 64  # int32s: GPU kernels may read a slice in place and need 256-byte alignment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowInput:
    """The pages and the attention plan of W page groups with the same window.

    Attributes:
        kv_slots: KV index of each row in each group, as in StepInput.
        pages: R page ids of each sequence in each group, from ``first_page`` on.
        first_page: number of the first page that the step reaches in each sequence.
        plan: the attention work lists, the same for all groups.
    """

    kv_slots: Int[IntArray, "W T"]
    pages: Int[IntArray, "W B R"]
    first_page: Int[IntArray, " B"]
    plan: AttentionPlan

    def page_tables(self, table_pages: int) -> Int[Array, "W B M"]:
        """Tables of ``table_pages`` pages; entries before the first page repeat it.

        Attention may read those at the edge of a window, where it masks them: they must hold KV.
        """
        column = jnp.arange(table_pages) - jnp.asarray(self.first_page)[:, None]
        column = jnp.clip(column, 0, self.pages.shape[2] - 1)
        return jnp.take_along_axis(jnp.asarray(self.pages), column[None], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's batch: T packed token rows of B sequences, padded.

    Attributes:
        tokens: token ids known to the host; 0 in rows with a ``token_slot``.
        token_slot: sampler slot whose last token, still on the device, is this row's; -1 for none.
        positions: position of each row in its sequence; -1 for padding.
        kv_slots: KV index of each row, page * S + offset; -1 for padding and for stored KV.
        page_table: page ids of each sequence.
        sample_row: the row whose logits give each sequence's next token.
        slots: sampler slot of each sequence.
        live: 1 where the sequence samples a token in this step.
        plan: the attention work lists.
        windows: inputs of each window but that of the first page group, which the fields above
            serve.
    """

    tokens: Int[IntArray, " T"]
    token_slot: Int[IntArray, " T"]
    positions: Int[IntArray, " T"]
    kv_slots: Int[IntArray, " T"]
    page_table: Int[IntArray, "B M"]
    sample_row: Int[IntArray, " B"]
    slots: Int[IntArray, " B"]
    live: Int[IntArray, " B"]
    plan: AttentionPlan
    windows: tuple[WindowInput, ...] = ()

    @property
    def plans(self) -> tuple[AttentionPlan, ...]:
        """The attention plans of all page groups, one a window."""
        return (self.plan, *[window.plan for window in self.windows])


def build_step_input(
    batch: list[ScheduledSequence],
    tables: Int[np.ndarray, "groups slots pages"],
    shape: StepShape,
    sharing: Sharing,
) -> tuple[StepInput, tuple[PlanStats, ...]]:
    """Build the input of a step of this shape from a batch, in its order.

    Args:
        batch: the running sequences.
        tables: page table of each page group; row s lists the pages of the sequence in slot s.
            Entries of pages that it does not hold are ignored.
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
    page_table = np.zeros((shape.seqs, shape.table_pages), np.int32)
    page_table[:A] = tables[0, slots]
    unwritten = positions < stored[of_row]
    [kv_slots] = kv_slots_of(tables[:1], slots[of_row], positions, S)
    kv_slots[unwritten] = -1
    known = np.fromiter([s.num_known for s in sequences], np.int32, A)
    unknown = stop > known  # the last token of a sequence may still be on the device
    token_slot = np.full(shape.rows, -1, np.int32)
    token_slot[query_start[1:][unknown] - 1] = slots[unknown]
    tokens = _tokens(batch, np.flatnonzero(start < known), query_start, shape.rows)
    repeat_first_pages(page_table[:A], start, shape)
    plan, main_stats = plan_attention(
        page_table[:A],
        query_start,
        stop,
        page_size=S,
        shape=shape.plan,
        sharing=sharing,
    )
    windows, plan_stats = [], [main_stats]
    for (window, group, end), window_shape in zip(shape.kinds[1:], shape.window_plans, strict=True):
        assert window is not None
        of_window = tables[group:end]
        padded_slots = np.full((end - group, shape.rows), -1, np.int32)
        written = kv_slots_of(of_window, slots[of_row], positions, S)
        padded_slots[:, :T] = np.where(unwritten, -1, written)
        first = first_pages(start, window, S)
        pages = np.zeros((end - group, shape.seqs, shape.window_pages(window)), np.int32)
        pages[:, :A] = pages_from(of_window, slots, first, pages.shape[2])
        window_plan, window_stats = plan_attention(
            of_window,
            query_start,
            stop,
            page_size=S,
            shape=window_shape,
            sharing=sharing,
            table_rows=slots,
        )
        windows.append(WindowInput(padded_slots, pages, _padded(first, shape.seqs, 0), window_plan))
        plan_stats.append(window_stats)
    step_input = StepInput(
        tokens=tokens,
        token_slot=token_slot,
        positions=_padded(positions, shape.rows, -1),
        kv_slots=_padded(kv_slots, shape.rows, -1),
        page_table=page_table,
        sample_row=_padded(query_start[1:] - 1, shape.seqs, 0),
        slots=_padded(slots, shape.seqs, 0),
        live=_padded(samples, shape.seqs, 0),
        plan=plan,
        windows=tuple(windows),
    )
    return step_input, tuple(plan_stats)


def mean_stats(stats: tuple[PlanStats, ...], groups: PageGroups | None) -> PlanStats:
    """What all layers read, divided by their number; ``stats`` are those of each plan."""
    if groups is None:
        [found] = stats
        return found
    layers = [groups.layers_of(window) for window, _, _ in groups.kinds]

    def mean(values: list[int]) -> int:
        return sum(n * value for n, value in zip(layers, values, strict=True)) // sum(layers)

    return PlanStats(
        kv_tokens_read=mean([found.kv_tokens_read for found in stats]),
        kv_tokens_unshared=mean([found.kv_tokens_unshared for found in stats]),
        shared_groups=sum(found.shared_groups for found in stats),
    )


def first_pages(start: Int[np.ndarray, " A"], window: int, page_size: int) -> np.ndarray:
    """Number of the first page that the rows of each sequence reach; ``start`` is its first row."""
    return np.fromiter([first_page(s, window, page_size) for s in start.tolist()], np.int32)


def repeat_first_pages(
    page_table: Int[np.ndarray, "A M"], start: Int[np.ndarray, " A"], shape: StepShape
) -> None:
    """Replace the entries before the first page, where all layers have a window, by that page.

    `WindowInput.page_tables` does so for the other page groups.
    """
    window = shape.kinds[0][0]
    if window is None:
        return
    first = first_pages(start, window, shape.page_size)
    held = page_table[np.arange(first.size), first]
    before = np.arange(page_table.shape[1]) < first[:, None]
    np.copyto(page_table, held[:, None], where=before)


def kv_slots_of(
    tables: Int[np.ndarray, "W slots pages"],
    slots: Int[np.ndarray, " T"],
    positions: Int[np.ndarray, " T"],
    page_size: int,
) -> Int[np.ndarray, "W T"]:
    """KV index of each row in each page group; ``slots`` is that of the row's sequence."""
    return tables[:, slots, positions // page_size] * page_size + positions % page_size


def pages_from(
    tables: Int[np.ndarray, "W slots pages"],
    slots: Int[np.ndarray, " A"],
    first: Int[np.ndarray, " A"],
    count: int,
) -> Int[np.ndarray, "W A R"]:
    """``count`` pages of each sequence from its ``first`` on; the table's last is repeated."""
    columns = np.minimum(first[:, None] + np.arange(count), tables.shape[2] - 1)
    return tables[:, slots[:, None], columns]


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
    window = shape.kinds[0][0]
    checked = [(step_input.page_table, step_input.kv_slots, step_input.plan, window)]
    for found, (window, _, _) in zip(step_input.windows, shape.kinds[1:], strict=True):
        tables = np.asarray(found.page_tables(shape.table_pages))
        for table, slots in zip(tables, found.kv_slots, strict=True):
            checked.append((table, slots, found.plan, window))
    for table, slots, plan, window in checked:
        check_values(
            table,
            step_input.positions,
            plan,
            num_pages=num_pages,
            page_size=shape.page_size,
            sequence_of_row=owners,
            sliding_window=window,
        )
        check_writes(slots, num_pages=num_pages, page_size=shape.page_size)


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


def prompt_targets(batch: list[ScheduledSequence], rows: int) -> Int[np.ndarray, " T"]:
    """The prompt token that follows each row of a step, where prompt logprobs are wanted; else 0.

    Args:
        batch: the scheduled sequences in the order of the step.
        rows: number of token rows in the step, T.
    """
    targets, row = np.zeros(rows, np.int32), 0
    for sequence, start, stop, _, _ in batch:
        if sequence.params.prompt_logprobs is not None:
            following = sequence.prompt_array[start + 1 : stop + 1]
            targets[row : row + len(following)] = following
        row += stop - start
    return targets


def empty_tables(shape: StepShape) -> Int[np.ndarray, "groups 1 M"]:
    """The page tables of one slot."""
    groups = 1 if shape.groups is None else len(shape.groups.windows)
    return np.zeros((groups, 1, shape.table_pages), np.int32)


class PackedLayout:
    """Packs a StepInput of one shape into one int32 vector and, inside the step, unpacks it."""

    def __init__(self, shape: StepShape) -> None:
        template, _ = build_step_input([], empty_tables(shape), shape, "off")
        self.shape = shape
        leaves, self._treedef = jax.tree.flatten(template)
        self._shapes = [leaf.shape for leaf in leaves]
        ends = np.cumsum([-(-leaf.size // _ALIGNMENT) * _ALIGNMENT for leaf in leaves])
        self._starts = [0, *ends[:-1].tolist()]
        self.size = int(ends[-1])

    def pack(self, step_input: StepInput) -> Int[np.ndarray, " Z"]:
        """All leaves, one after the other, each at an aligned offset."""
        packed = np.zeros(self.size, np.int32)
        for start, leaf in zip(self._starts, jax.tree.leaves(step_input), strict=True):
            packed[start : start + leaf.size] = np.ravel(leaf)
        return packed

    def sampled_rows(self, packed: Int[np.ndarray, " Z"]) -> Int[np.ndarray, "2 B"]:
        """The fields ``slots`` and ``live`` of a packed StepInput."""
        fields = [field.name for field in dataclasses.fields(StepInput)]
        first = fields.index("slots")
        assert fields[first + 1] == "live"  # one leaf each, and so are all fields before them
        (size,) = self._shapes[first]
        starts = self._starts[first : first + 2]
        return np.stack([packed[start : start + size] for start in starts])

    def unpack(self, packed: Int[IntArray, " Z"]) -> StepInput:
        """The StepInput again, as slices of the device array, or as views of the host's."""
        leaves: list[Any] = [
            packed[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


class PackedLayouts(dict[StepShape, PackedLayout]):
    """The layout of each step shape, made at the first look-up."""

    def __missing__(self, shape: StepShape) -> PackedLayout:
        layout = self[shape] = PackedLayout(shape)
        return layout
