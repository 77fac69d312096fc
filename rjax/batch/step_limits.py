"""Limits on the tokens and the sequences of one step."""

import dataclasses
from collections.abc import Callable

from rjax.config import SchedulerSettings

_MAX_PREFILL_AHEAD = 8  # in one step: each takes a row of its page table and its logits
_AUTO = (256, 128, 64, 32, 16)  # sequences; each is a size of the decode steps of the one before it
_AUTO_TOKENS = 256  # of each sequence that the pool holds: a unique prompt and a short answer
_AUTO_WITHOUT_MEMORY = 64


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
        settings: the scheduler's settings, with a number in ``max_num_seqs``.
        most_tokens: most tokens of a step, if the settings give no ``max_num_batched_tokens``.
        spare_rows: tokens up to which a step takes little longer than a step of few; 0 if every
            token costs the same.
    """
    max_num_seqs = settings.max_num_seqs
    assert max_num_seqs != "auto", "choose_step_limits takes auto"
    budget = settings.max_num_batched_tokens or max(most_tokens, max_num_seqs)
    spare = min(spare_rows, budget)
    if spare <= max_num_seqs:
        spare = 0
    prefill_ahead = settings.max_num_prefill_ahead
    if prefill_ahead is None:
        prefill_ahead = max_num_seqs if spare else 0
    prefill_ahead_tokens = (spare or budget) if prefill_ahead else 0
    return StepLimits(max_num_seqs, budget, prefill_ahead, prefill_ahead_tokens)


def choose_step_limits(
    settings: SchedulerSettings,
    *,
    most_tokens: int,
    spare_rows: int,
    max_model_len: int,
    pool_tokens: Callable[[StepLimits], int] | None,
) -> StepLimits:
    """The limits for these settings, whose ``max_num_seqs`` may be "auto".

    With "auto" the number of sequences follows the memory that the weights and the largest step
    leave. A sequence needs few tokens of its own where prefixes are shared, and the scheduler
    admits no more sequences than the pool holds, so a number that is too large costs only the
    memory and the compile time of larger steps.

    Args:
        settings: the scheduler's settings.
        most_tokens, spare_rows: arguments of `step_limits`.
        max_model_len: tokens of the longest sequence.
        pool_tokens: returns the tokens that the KV pool holds with some limits. None where the
            number does not follow the memory.
    """
    if settings.max_num_seqs != "auto":
        return step_limits(settings, most_tokens=most_tokens, spare_rows=spare_rows)
    budget = settings.max_num_batched_tokens or most_tokens

    def limits(max_num_seqs: int) -> StepLimits:
        chosen = dataclasses.replace(settings, max_num_seqs=min(max_num_seqs, budget))
        return step_limits(chosen, most_tokens=most_tokens, spare_rows=spare_rows)

    if pool_tokens is None:
        return limits(_AUTO_WITHOUT_MEMORY)
    for max_num_seqs in _AUTO[:-1]:
        found = limits(max_num_seqs)
        each = min(_AUTO_TOKENS, max_model_len)
        if pool_tokens(found) >= max(found.max_num_seqs * each, max_model_len):
            return found
    return limits(_AUTO[-1])
