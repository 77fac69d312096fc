"""A step as the scheduler asks for it, and while it is put together."""

import dataclasses

from rjax.batch.page_operations import PageOperation
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence
from rjax.batch.step_limits import StepLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step: what runs, and which sequences enter the running set (their slots are new).

    ``operations`` must be dispatched, in their order, before the step.
    """

    scheduled: list[ScheduledSequence]
    admitted: list[Sequence]
    operations: list[PageOperation] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(item.stop - item.start for item in self.scheduled)


@dataclasses.dataclass(slots=True)
class StepInTheMaking:
    """What the scheduler has put into a step so far, and the room that is left.

    Attributes:
        limits: of the step.
        items: what is in it.
        num_tokens: of those.
        places: sequences that may still have their turn.
        seqs_ahead: sequences ahead in the step.
    """

    limits: StepLimits
    items: list[ScheduledSequence] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    places: int = 0
    seqs_ahead: int = 0

    @property
    def room(self) -> int:
        """Tokens that fit in."""
        return self.limits.max_num_batched_tokens - self.num_tokens

    @property
    def room_ahead(self) -> int:
        """Tokens that fit in of a sequence ahead."""
        if self.seqs_ahead == self.limits.ahead_seqs:
            return 0
        return max(0, self.limits.ahead_tokens - self.num_tokens)

    @property
    def has_room(self) -> bool:
        """Whether a sequence can be admitted to it."""
        return (self.room if self.places else self.room_ahead) > 0
