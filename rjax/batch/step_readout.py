"""The result of a step on the host."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32


@dataclasses.dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log-probabilities of X tokens, with A alternatives each.

    Attributes:
        logprob: natural log of the token's probability.
        rank: rank of the token, 1 for the most likely.
        top_ids: the most likely tokens, best first.
        top_logprobs: their log-probabilities.
    """

    logprob: Float32[np.ndarray, " X"]
    rank: Int32[np.ndarray, " X"]
    top_ids: Int32[np.ndarray, "X A"]
    top_logprobs: Float32[np.ndarray, "X A"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepReadout:
    """The sampled tokens and log-probabilities of one step.

    Attributes:
        tokens: sampled token of each sequence of the batch; -1 where none was sampled.
        sampled: log-probabilities of the sampled tokens; None if no request asked for them.
        prompt: log-probabilities of the prompt token after each row; None if not asked for.
        num_steps: decode steps of the program that computed it.
    """

    tokens: Int32[np.ndarray, " B"]
    sampled: HostLogprobs | None
    prompt: HostLogprobs | None
    num_steps: int = 1
