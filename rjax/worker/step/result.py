"""The result of a step, on the device and on the host."""

import dataclasses
from typing import no_type_check

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from rjax.batch.step_readout import HostLogprobs, StepReadout
from rjax.sampling import TokenLogprobs


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step; parts that no request asked for are None.

    The host reads all but the logits and hidden states, one step late.

    Attributes:
        tokens: sampled token of each sequence of the batch; -1 where none was.
        sampled: logprobs of the sampled tokens.
        prompt: logprobs of the tokens that follow each of the T rows.
        logits: logits of each sequence of the batch, for a sampling program.
        hidden: final-normed hidden states of the T rows, for the prompt logprobs.
    """

    tokens: Int[Array, " B"]
    sampled: TokenLogprobs | None = None
    prompt: TokenLogprobs | None = None
    logits: Float32[Array, "B V"] | None = None
    hidden: Float[Array, "T D"] | None = None


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
