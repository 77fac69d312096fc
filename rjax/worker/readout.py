"""A step's result on the host."""

import dataclasses

import numpy as np
from jaxtyping import Float32, Int32

from rjax.sampling import TokenLogprobs
from rjax.worker.step import StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Logprobs of X tokens; fields as in ``TokenLogprobs``."""

    logprob: Float32[np.ndarray, " X"]
    rank: Int32[np.ndarray, " X"]
    top_ids: Int32[np.ndarray, "X A"]
    top_logprobs: Float32[np.ndarray, "X A"]


@dataclasses.dataclass(frozen=True, slots=True)
class StepReadout:
    """Fields as in ``StepResult``."""

    tokens: Int32[np.ndarray, " B"]
    sampled: HostLogprobs | None
    prompt: HostLogprobs | None


def read_result(result: StepResult) -> StepReadout:
    """Wait for a step and copy its result to the host."""
    return StepReadout(
        tokens=np.asarray(result.tokens),
        sampled=_read_logprobs(result.sampled),
        prompt=_read_logprobs(result.prompt),
    )


def _read_logprobs(found: TokenLogprobs | None) -> HostLogprobs | None:
    if found is None:
        return None
    names = (field.name for field in dataclasses.fields(HostLogprobs))
    return HostLogprobs(**{name: np.asarray(getattr(found, name)) for name in names})
