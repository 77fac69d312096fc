"""What a step is told, packed into one array so that it reaches the device in one transfer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.attention.planner import PlanStats, Sharing, plan_attention
from pallas_kernels.attention.work_list import AttentionPlan
from rjax.engine.scheduler import ScheduledSequence
from rjax.worker.step_shape import StepShape

type IntArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step's batch: T packed token rows of B sequences, padded.

    Attributes:
        tokens: token ids known to the host; 0 where ``token_slot`` says otherwise.
        token_slot: sampling slot whose last token, still on the device, is this row's; -1 for none.
        positions: of each row in its sequence; -1 for padding.
        kv_slots: where each row's K and V go, page * S + offset; -1 for padding.
        targets: the prompt token that follows each row, for prompt logprobs; 0 where there is none.
        page_table: page ids of each sequence.
        sample_row: the row whose logits give each sequence's next token.
        slots: sampling slot of each sequence.
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
    batch: list[ScheduledSequence], shape: StepShape, sharing: Sharing
) -> tuple[StepInput, PlanStats]:
    """Lay out a batch, in the given order, for a step of this shape."""
    S = shape.page_size
    rows = {
        name: np.full(shape.rows, fill, np.int32)
        for name, fill in (
            ("tokens", 0),
            ("token_slot", -1),
            ("positions", -1),
            ("kv_slots", -1),
            ("targets", 0),
        )
    }
    seqs = {name: np.zeros(shape.seqs, np.int32) for name in ("sample_row", "slots", "live")}
    page_table = np.zeros((shape.seqs, shape.table_pages), np.int32)
    query_start = np.zeros(len(batch) + 1, np.int32)
    context_len = np.zeros(len(batch), np.int32)
    row = 0
    for b, item in enumerate(batch):
        sequence = item.sequence
        assert sequence.slot is not None, "only running sequences are scheduled"
        count = item.stop - item.start
        here = slice(row, row + count)
        known = sequence.tokens(item.start, min(item.stop, sequence.num_known))
        rows["tokens"][row : row + len(known)] = known
        if len(known) < count:
            # At most the very last token can be unknown: the one in flight.
            rows["token_slot"][row + count - 1] = sequence.slot
        positions = np.arange(item.start, item.stop, dtype=np.int32)
        rows["positions"][here] = positions
        pages = np.asarray(sequence.pages, np.int32)
        page_table[b, : pages.size] = pages
        rows["kv_slots"][here] = pages[positions // S] * S + positions % S
        following = sequence.prompt_token_ids[item.start + 1 : item.stop + 1]
        rows["targets"][row : row + len(following)] = following
        row += count
        seqs["sample_row"][b] = row - 1
        seqs["slots"][b] = sequence.slot
        seqs["live"][b] = item.samples
        query_start[b + 1] = row
        context_len[b] = item.stop
    plan, stats = plan_attention(
        page_table[: len(batch)],
        query_start,
        context_len,
        page_size=S,
        shape=shape.plan,
        sharing=sharing,
    )
    return StepInput(**rows, page_table=page_table, **seqs, plan=plan), stats


class PackedLayout:
    """Turns a StepInput of one shape into one int32 vector and, inside the step, back."""

    def __init__(self, shape: StepShape) -> None:
        template, _ = build_step_input([], shape, "off")
        leaves, self._treedef = jax.tree.flatten(template)
        self._shapes = [leaf.shape for leaf in leaves]
        self.size = sum(leaf.size for leaf in leaves)

    def pack(self, step_input: StepInput) -> Int[np.ndarray, " Z"]:
        """All leaves one after the other."""
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(step_input)])

    def unpack(self, packed: Int[Array, " Z"]) -> StepInput:
        """The StepInput again, as slices of the device array."""
        leaves: list[Any] = []
        start = 0
        for shape in self._shapes:
            size = int(np.prod(shape))
            leaves.append(jnp.reshape(packed[start : start + size], shape))
            start += size
        return jax.tree.unflatten(self._treedef, leaves)
