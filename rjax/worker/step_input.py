"""The input of a step, packed into one array that reaches the device in one transfer."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.pallas_kernels.attention.check import check_values, check_writes
from rjax.pallas_kernels.attention.planner import PlanStats, Sharing, plan_attention
from rjax.pallas_kernels.attention.work_list import AttentionPlan
from rjax.worker.step_shape import StepShape

type IntArray = Array | np.ndarray

_ALIGNMENT = 64  # int32s: GPU kernels may read a slice in place and need 256-byte alignment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's batch: T packed token rows of B sequences, padded.

    Attributes:
        tokens: token ids known to the host; 0 in rows with a ``token_slot``.
        token_slot: sampler slot whose last token, still on the device, is this row's; -1 for none.
        positions: of each row in its sequence; -1 for padding.
        kv_slots: KV index of each row, page * S + offset; -1 for padding and for stored KV.
        targets: the prompt token that follows each row if prompt logprobs are wanted; else 0.
        page_table: page ids of each sequence.
        sample_row: the row whose logits give each sequence's next token.
        slots: sampler slot of each sequence.
        live: 1 where the sequence samples a token in this step.
        plan: the attention work lists.
    """

    tokens: Int[IntArray, " T"]
    token_slot: Int[IntArray, " T"]
    positions: Int[IntArray, " T"]
    kv_slots: Int[IntArray, " T"]
    targets: Int[IntArray, " T"]
    page_table: Int[IntArray, "B M"]
    sample_row: Int[IntArray, " B"]
    slots: Int[IntArray, " B"]
    live: Int[IntArray, " B"]
    plan: AttentionPlan


def build_step_input(
    batch: list[ScheduledSequence],
    tables: Int[np.ndarray, "slots pages"],
    shape: StepShape,
    sharing: Sharing,
) -> tuple[StepInput, PlanStats]:
    """Build the input of a step of this shape from a batch, in its order.

    Args:
        batch: of running sequences.
        tables: row s lists the pages of the sequence in slot s; entries beyond them are ignored.
        shape: of the compiled step.
        sharing: which shared pages attention reads once.
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
    page_table[:A] = tables[slots]
    kv_slots = page_table[of_row, positions // S] * S + positions % S
    kv_slots[positions < stored[of_row]] = -1
    known = np.fromiter([s.num_known for s in sequences], np.int32, A)
    unknown = stop > known  # the last token of a sequence may still be on the device
    token_slot = np.full(shape.rows, -1, np.int32)
    token_slot[query_start[1:][unknown] - 1] = slots[unknown]
    tokens, targets = _tokens(batch, np.flatnonzero(start < known), query_start, shape.rows)
    plan, stats = plan_attention(
        page_table[:A],
        query_start,
        stop,
        page_size=S,
        shape=shape.plan,
        sharing=sharing,
    )
    step_input = StepInput(
        tokens=tokens,
        token_slot=token_slot,
        positions=_padded(positions, shape.rows, -1),
        kv_slots=_padded(kv_slots, shape.rows, -1),
        targets=targets,
        page_table=page_table,
        sample_row=_padded(query_start[1:] - 1, shape.seqs, 0),
        slots=_padded(slots, shape.seqs, 0),
        live=_padded(samples, shape.seqs, 0),
        plan=plan,
    )
    return step_input, stats


def check_step_input(
    step_input: StepInput, batch: list[ScheduledSequence], *, num_pages: int, page_size: int
) -> None:
    """Check a step's page tables, positions, writes and attention plan against each other.

    Raises:
        ValueError: they are inconsistent.
    """
    rows = [item.stop - item.start for item in batch]
    owners = np.repeat(np.arange(len(batch)), rows).astype(np.int32)
    check_values(
        step_input.page_table,
        step_input.positions,
        step_input.plan,
        num_pages=num_pages,
        page_size=page_size,
        sequence_of_row=_padded(owners, step_input.positions.shape[0], 0),
    )
    check_writes(step_input.kv_slots, num_pages=num_pages, page_size=page_size)


def _padded(values: np.ndarray, size: int, fill: int) -> Int[np.ndarray, " size"]:
    out = np.full(size, fill, np.int32)
    out[: values.size] = values
    return out


def _tokens(
    batch: list[ScheduledSequence],
    members: Int[np.ndarray, " X"],
    query_start: Int[np.ndarray, " A1"],
    rows: int,
) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
    """Tokens and targets of all rows; only ``members`` have tokens known to the host."""
    tokens, targets = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for b in members.tolist():
        sequence, start, stop, _, _ = batch[b]
        row = query_start[b]
        ids = sequence.tokens(start, min(stop, sequence.num_known))
        tokens[row : row + len(ids)] = ids
        if sequence.params.prompt_logprobs is not None:
            following = sequence.prompt_token_ids[start + 1 : stop + 1]
            targets[row : row + len(following)] = following
    return tokens, targets


class PackedLayout:
    """Packs a StepInput of one shape into one int32 vector and, inside the step, unpacks it."""

    def __init__(self, shape: StepShape) -> None:
        template, _ = build_step_input([], np.zeros((1, shape.table_pages), np.int32), shape, "off")
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

    def unpack(self, packed: Int[Array, " Z"]) -> StepInput:
        """The StepInput again, as slices of the device array."""
        leaves: list[Any] = []
        for start, shape in zip(self._starts, self._shapes, strict=True):
            size = int(np.prod(shape))
            leaves.append(packed[start : start + size].reshape(shape))
        return jax.tree.unflatten(self._treedef, leaves)


class PackedLayouts(dict[StepShape, PackedLayout]):
    """The layout of each step shape, made at the first look-up."""

    def __missing__(self, shape: StepShape) -> PackedLayout:
        layout = self[shape] = PackedLayout(shape)
        return layout
