"""The step that the scheduler chose, and its builder."""

import dataclasses

from rjax.batch.page_operations import PageOperation
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence
from rjax.batch.step_limits import StepLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Attributes:
        scheduled: the sequences of the step, with the tokens of each that are computed.
        admitted: sequences that entered the running set, with a new slot each.
        operations: page operations to dispatch before the step, in their order.
    """

    scheduled: list[ScheduledSequence]
    admitted: list[Sequence]
    operations: list[PageOperation] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.stop - item.start for item in self.scheduled)


@dataclasses.dataclass(slots=True)
class StepBuilder:
    """What the scheduler has put into a step, and what still fits.

    Attributes:
        limits: limits of the step.
        items: sequences scheduled in the step so far.
        num_tokens: number of tokens in ``items``.
        free_slots: sequences that may still be scheduled to generate.
        num_prefill_ahead: prefill-ahead sequences in the step.
        short_of_pages: whether a running sequence got too few pages for its tokens.
    """

    limits: StepLimits
    items: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    free_slots: int = 0
    num_prefill_ahead: int = 0
    short_of_pages: bool = False

    @property
    def tokens_left(self) -> int:
        """Tokens that still fit."""
        return self.limits.max_num_batched_tokens - self.num_tokens

    @property
    def prefill_ahead_tokens_left(self) -> int:
        """Tokens of a prefill-ahead sequence that still fit."""
        if self.num_prefill_ahead == self.limits.max_prefill_ahead_seqs:
            return 0
        return max(0, self.limits.prefill_ahead_tokens - self.num_tokens)

    @property
    def can_admit(self) -> bool:
        """Whether a new sequence fits."""
        if self.short_of_pages:
            return False
        return (self.tokens_left if self.free_slots else self.prefill_ahead_tokens_left) > 0
