"""The few fixed shapes that every step is padded to."""

import dataclasses
import math
from collections.abc import Callable

from pallas_kernels.attention.planner import PlanShape
from pallas_kernels.attention.split_policy import SplitPolicy
from rjax.engine.schedule import ScheduledSequence
from rjax.engine.step_limits import StepLimits
from rjax.sampling import SamplerMode, step_mode


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """Shapes of one compiled step.

    Attributes:
        rows: T, tokens computed.
        seqs: B, sequences in the batch.
        table_pages: M, pages of the longest sequence.
        page_size: S.
        plan: shapes of the attention plan.
    """

    rows: int
    seqs: int
    table_pages: int
    page_size: int
    plan: PlanShape


@dataclasses.dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a step computes besides the next token; part of the compiled program.

    Attributes:
        sampling: the cheapest sampler mode that serves every sequence of the step.
        num_logprobs: alternatives returned for each sampled token; 0 returns no logprobs at all.
        prompt_logprobs: return logprobs of the prompt tokens too.
    """

    sampling: SamplerMode
    num_logprobs: int
    prompt_logprobs: bool


def step_features(batch: list[ScheduledSequence], num_logprobs: int) -> StepFeatures:
    """What a batch asks of its step, whose logprobs have so many alternatives."""
    sequences = [item.sequence for item in batch]
    prompt = sampled = False
    if any([s.wants_logprobs for s in sequences]):
        sampled = any(s.params.logprobs is not None for s in sequences)
        prompt = any(
            item.sequence.params.prompt_logprobs is not None
            and item.start < len(item.sequence.prompt_token_ids)
            for item in batch
        )
    return StepFeatures(
        sampling=step_mode({s.sampler_mode for s in sequences}),
        num_logprobs=num_logprobs if prompt or sampled else 0,
        prompt_logprobs=prompt,
    )


class ShapeTable:
    """Chooses the smallest step that holds a schedule.

    Steps with one token a sequence come in batch sizes b, b / g, ..., 1 for at most b sequences,
    each padded to ``padded_rows`` of them; steps with prompt chunks in t, t / g, t / g^2 rows for a
    budget of t tokens, and in ``ahead_tokens`` rows, with room for sequences ahead. The attention
    of r sequences or more rows is cut at multiples of ``cut_of(r)`` tokens, in items of
    ``item_rows`` of the step's rows at most.
    """

    def __init__(
        self,
        *,
        limits: StepLimits,
        max_model_len: int,
        page_size: int,
        item_rows: Callable[[int], int],
        cut_of: Callable[[int], int],
        padded_rows: Callable[[int], int],
        joining: SplitPolicy | None,
        growth: int,
    ) -> None:
        def shape(rows: int, seqs: int, cut: int) -> StepShape:
            plan = PlanShape(rows, seqs, max_model_len, item_rows(rows), cut, joining)
            return StepShape(rows, seqs, math.ceil(max_model_len / page_size), page_size, plan)

        sizes = [limits.max_num_seqs]
        while sizes[-1] > 1:
            sizes.append(math.ceil(sizes[-1] / growth))
        self._decode = [shape(padded_rows(size), size, cut_of(size)) for size in reversed(sizes)]
        most = limits.max_num_batched_tokens
        chunks = {most // growth**i for i in range(3)} | {limits.ahead_tokens}
        self._mixed = [
            shape(
                rows,
                limits.max_num_seqs + (limits.ahead_seqs if rows <= limits.ahead_tokens else 0),
                cut_of(rows),
            )
            for rows in sorted(chunks)
            if rows > limits.max_num_seqs
        ] or [shape(most, limits.max_num_seqs, cut_of(most))]

    @property
    def all(self) -> list[StepShape]:
        """Every shape, smallest first within each kind."""
        return [*self._decode, *self._mixed]

    @property
    def decode(self) -> list[StepShape]:
        """Those with one token a sequence."""
        return self._decode

    @property
    def largest(self) -> StepShape:
        """The shape that needs the most workspace."""
        return self._mixed[-1]

    def choose(self, *, rows: int, seqs: int) -> StepShape:
        """The shape for so many tokens of so many sequences; one token each if they are equal."""
        one_each = rows == seqs <= self._decode[-1].seqs
        candidates = self._decode if one_each else self._mixed
        return next(s for s in candidates if s.rows >= rows and s.seqs >= seqs)
