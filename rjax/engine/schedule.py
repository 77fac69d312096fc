"""A step as the scheduler asks for it."""

import dataclasses
from typing import NamedTuple

from rjax.engine.page_operations import PageOperation
from rjax.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A run of tokens of one sequence: positions [start, stop) are computed in this step.

    ``samples`` says whether the run reaches the sequence's end, so that a token is sampled. The KV
    of positions before ``stored`` is in the pages already, and is not written again.
    """

    sequence: Sequence
    start: int
    stop: int
    samples: bool
    stored: int = 0


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
