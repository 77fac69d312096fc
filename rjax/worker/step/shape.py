"""The few fixed shapes that every step is padded to."""

import dataclasses
import math
from collections.abc import Callable

from rjax.batch.page_groups import GroupKind, PageGroups
from rjax.batch.step_limits import StepLimits
from rjax.config import EngineConfig
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.worker.backend import Backend


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """Shapes of one compiled step.

    Attributes:
        rows: T, tokens computed.
        seqs: B, sequences in the batch.
        table_pages: M, pages of the longest sequence.
        page_size: tokens a page, S.
        groups: page groups of the layers.
        plans: shapes of the attention plan of each kind of group, as ``kinds`` lists them.
        one_row_each: a sequence has one row at most, for which layers with states have a kernel.
    """

    rows: int
    seqs: int
    table_pages: int
    page_size: int
    groups: PageGroups
    plans: tuple[PlanShape, ...]
    one_row_each: bool = False

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """The kinds of page groups; each has a plan."""
        return self.groups.kinds

    @property
    def kv_split_size(self) -> int:
        """The smallest KV split of the plans."""
        return min(plan.kv_split_size for plan in self.plans)

    def pages_reached(self, window: int | None) -> int:
        """Pages that the tokens of one sequence in a step reach at most, under this window."""
        if window is None:
            return self.table_pages
        return min(self.table_pages, (window + self.rows - 2) // self.page_size + 2)


class ShapeTable:
    """Chooses the smallest compiled step that holds a batch.

    Decode steps, with one token a sequence, have batch sizes b, b / g, ..., 1 for at most b
    sequences. A size that is padded to as many rows as a larger one is left out: the larger one
    serves it, and each size takes time to compile. Mixed steps, with prompt chunks, have t, t / g
    and t / g^2 rows for a budget of t tokens, and ``prefill_ahead_tokens`` rows with space for
    prefill-ahead sequences. Decode shapes of ``spare_rows`` rows or more hold prompt chunks too, if
    the model has no states.

    Args:
        limits: limits of the steps, with b and t.
        max_model_len: tokens of the longest sequence.
        page_size: tokens a page.
        plan_shape: (step rows, sequences, rows without padding, window) -> shapes of the attention
            plan.
        padded_rows: decode batch size -> rows of its step.
        spare_rows: rows up to which a step is bound by reading the weights; 0 if that is not known.
        growth: g, ratio of one size to the next smaller one.
        groups: page groups of the layers.
    """

    def __init__(
        self,
        *,
        limits: StepLimits,
        max_model_len: int,
        page_size: int,
        plan_shape: Callable[[int, int, int, int | None], PlanShape],
        padded_rows: Callable[[int], int],
        growth: int,
        groups: PageGroups,
        spare_rows: int = 0,
    ) -> None:
        has_states = groups.num_state_layers > 0

        def shape(rows: int, seqs: int, unpadded_rows: int, *, decodes: bool = False) -> StepShape:
            pages = math.ceil(max_model_len / page_size)
            plans = [plan_shape(rows, seqs, unpadded_rows, kind.window) for kind in groups.kinds]
            one_row_each = decodes and has_states
            return StepShape(rows, seqs, pages, page_size, groups, tuple(plans), one_row_each)

        sizes = [limits.max_num_seqs]
        while sizes[-1] > 1:
            sizes.append(math.ceil(sizes[-1] / growth))
        self._decode = [
            shape(padded_rows(size), size, size, decodes=True)
            for size in reversed(sizes)
            if not any(other > size and padded_rows(other) == padded_rows(size) for other in sizes)
        ]
        most = limits.max_num_batched_tokens
        chunks = {most // growth**i for i in range(3)} | {limits.prefill_ahead_tokens}
        wide = [s for s in self._decode if 0 < spare_rows <= s.rows == s.seqs and not has_states]
        chunked = [
            shape(
                rows,
                limits.max_num_seqs
                + (limits.max_prefill_ahead_seqs if rows <= limits.prefill_ahead_tokens else 0),
                rows,
            )
            for rows in sorted(chunks)
            if rows > limits.max_num_seqs
        ] or [shape(most, limits.max_num_seqs, most)]
        self._mixed = list(dict.fromkeys((*wide, *chunked)))

    @property
    def all(self) -> list[StepShape]:
        """Every shape once, smallest first within each kind."""
        return list(dict.fromkeys((*self._decode, *self._mixed)))

    @property
    def decode(self) -> list[StepShape]:
        """The shapes with one token a sequence."""
        return self._decode

    @property
    def largest(self) -> StepShape:
        """The shape that needs the most workspace."""
        return self._mixed[-1]

    def choose(self, *, rows: int, seqs: int) -> StepShape:
        """The smallest shape for ``rows`` tokens of ``seqs`` sequences."""
        return self.fitting(rows=rows, seqs=seqs)[0]

    def fitting(self, *, rows: int, seqs: int) -> list[StepShape]:
        """All shapes for ``rows`` tokens of ``seqs`` sequences, smallest first; a decode shape
        only if each sequence has one token."""
        one_each = rows == seqs <= self._decode[-1].seqs
        candidates = self.all if one_each else self._mixed
        return [s for s in candidates if s.rows >= rows and s.seqs >= seqs]


def shape_table(
    config: EngineConfig,
    *,
    backend: Backend,
    max_model_len: int,
    limits: StepLimits,
    growth: int,
    groups: PageGroups,
) -> ShapeTable:
    """The step shapes of a backend.

    Args:
        config: the engine's configuration.
        backend: kernels of the steps.
        max_model_len: tokens of the longest sequence.
        limits: limits of the steps.
        growth: ratio of one step size to the next smaller one.
        groups: page groups of the model.
    """
    page_size = config.cache.page_size

    def plan_shape(rows: int, seqs: int, unpadded_rows: int, window: int | None) -> PlanShape:
        return backend.plan_shape(
            rows,
            seqs,
            max_model_len,
            page_size,
            unpadded_rows=unpadded_rows,
            coalesce=config.relay.mode == "auto",
            kv_split_size=config.relay.kv_split_size,
            window=window,
        )

    return ShapeTable(
        limits=limits,
        max_model_len=max_model_len,
        page_size=page_size,
        plan_shape=plan_shape,
        padded_rows=backend.padded_rows,
        spare_rows=backend.spare_rows,
        growth=growth,
        groups=groups,
    )
