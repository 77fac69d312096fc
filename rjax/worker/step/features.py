"""What a step computes besides the next token."""

import dataclasses

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence
from rjax.sampling import SamplerMode, step_mode


@dataclasses.dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a step computes besides the next token; each combination is its own program.

    Attributes:
        sampling: the cheapest sampler mode that serves every sequence of the step.
        num_logprobs: alternatives returned for each sampled token; 0 returns no logprobs of them.
        num_prompt_logprobs: the same for the prompt's tokens.
        processed_logprobs: whether some of the sampled tokens' logprobs are those of the
            distribution that they are sampled from.
    """

    sampling: SamplerMode
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    processed_logprobs: bool = False


def step_features(batch: list[ScheduledSequence], num_logprobs: int) -> StepFeatures:
    """The features of a batch's step; ``num_logprobs`` are returned if any sequence wants some."""
    sequences = [item.sequence for item in batch]
    prompt = sampled = processed = False
    if any([s.wants_logprobs for s in sequences]):
        sampled = any(s.params.logprobs is not None for s in sequences)
        processed = any(s.wants_processed_logprobs for s in sequences)
        prompt = any(
            item.sequence.params.prompt_logprobs is not None
            and item.start < len(item.sequence.prompt_token_ids)
            for item in batch
        )
    return StepFeatures(
        sampling=step_mode({s.sampler_mode for s in sequences}),
        num_logprobs=num_logprobs if sampled else 0,
        num_prompt_logprobs=num_logprobs if prompt else 0,
        processed_logprobs=processed,
    )


def features_of(sequence: Sequence, num_logprobs: int) -> list[StepFeatures]:
    """The features that a sequence may bring into steps with any others.

    Logprobs are those of the step's mode, which may be that of another sequence.
    """
    sampled = sequence.params.logprobs is not None
    modes: tuple[SamplerMode, ...] = ("random", "full") if sampled else (sequence.sampler_mode,)
    prompt = num_logprobs if sequence.params.prompt_logprobs is not None else 0
    processed = sequence.wants_processed_logprobs
    return [StepFeatures(mode, num_logprobs if sampled else 0, prompt, processed) for mode in modes]
