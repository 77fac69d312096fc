"""How much one step computes, and of how many sequences."""

import dataclasses

from rjax.config import SchedulerSettings

_MOST_AHEAD = 8  # sequences ahead in one step: each takes a row of its page table and logits


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """What the scheduler keeps to and the compiled steps have room for.

    Attributes:
        max_num_seqs: sequences that generate at once.
        max_num_batched_tokens: tokens of a step.
        max_num_ahead: further sequences, whose prompts are computed before they have their turn.
        ahead_tokens: those prompts fill a step up to so many tokens, all of its tokens counted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_ahead: int = 0
    ahead_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Sequences that hold pages at once."""
        return self.max_num_seqs + self.max_num_ahead

    @property
    def ahead_seqs(self) -> int:
        """Sequences ahead in one step."""
        return min(self.max_num_ahead, _MOST_AHEAD)


def step_limits(settings: SchedulerSettings, *, most_tokens: int, spare_rows: int) -> StepLimits:
    """The limits for these settings.

    Args:
        most_tokens: of a step, where the settings do not say.
        spare_rows: tokens up to which a step takes little longer than one of a few; 0 where every
            token costs the same.
    """
    budget = settings.max_num_batched_tokens or max(most_tokens, settings.max_num_seqs)
    spare = min(spare_rows, budget)
    if spare <= settings.max_num_seqs:
        spare = 0
    ahead = settings.max_num_ahead
    if ahead is None:
        ahead = settings.max_num_seqs if spare else 0
    return StepLimits(settings.max_num_seqs, budget, ahead, (spare or budget) if ahead else 0)
