"""Limits on the tokens and the sequences of one step."""

import dataclasses

from rjax.config import SchedulerSettings

_MAX_PREFILL_AHEAD = 8  # in one step: each takes a row of its page table and its logits


@dataclasses.dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of the scheduler, for which steps are compiled.

    Attributes:
        max_num_seqs: sequences that generate at once.
        max_num_batched_tokens: tokens of a step.
        max_num_prefill_ahead: further sequences whose prompts are computed before they can generate
            (prefill ahead).
        prefill_ahead_tokens: tokens of a step, all counted, up to which prefill ahead fills it.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_ahead: int = 0
    prefill_ahead_tokens: int = 0

    @property
    def num_slots(self) -> int:
        """Sequences that hold pages at once."""
        return self.max_num_seqs + self.max_num_prefill_ahead

    @property
    def max_prefill_ahead_seqs(self) -> int:
        """Prefill-ahead sequences in one step."""
        return min(self.max_num_prefill_ahead, _MAX_PREFILL_AHEAD)


def step_limits(settings: SchedulerSettings, *, most_tokens: int, spare_rows: int) -> StepLimits:
    """The limits for these settings.

    Args:
        settings: of the scheduler.
        most_tokens: of a step, if the settings give no ``max_num_batched_tokens``.
        spare_rows: tokens up to which a step takes little longer than a step of few; 0 if every
            token costs the same.
    """
    budget = settings.max_num_batched_tokens or max(most_tokens, settings.max_num_seqs)
    spare = min(spare_rows, budget)
    if spare <= settings.max_num_seqs:
        spare = 0
    prefill_ahead = settings.max_num_prefill_ahead
    if prefill_ahead is None:
        prefill_ahead = settings.max_num_seqs if spare else 0
    prefill_ahead_tokens = (spare or budget) if prefill_ahead else 0
    return StepLimits(settings.max_num_seqs, budget, prefill_ahead, prefill_ahead_tokens)
