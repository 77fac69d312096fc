"""Copies the result of a step to the host."""

import dataclasses

import jax
import numpy as np

from rjax.batch.step_readout import HostLogprobs, StepReadout
from rjax.sampling import TokenLogprobs
from rjax.worker.step import StepResult


def start_copy(result: StepResult) -> StepResult:
    """Start to copy a result to the host, and return it at once."""
    for leaf in jax.tree.leaves(result):
        leaf.copy_to_host_async()
    return result


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
