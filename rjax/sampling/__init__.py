"""Sampling: a request's parameters, their state on the device, and the sampler of a step."""

from rjax.config.sampling_limits import LIMITS, SamplingLimits
from rjax.sampling.params import RequestOutputKind, SamplerMode, SamplingParams, step_mode
from rjax.sampling.prompt_logprobs import TokenLogprobs, token_logprobs
from rjax.sampling.sampler import Argmax, SampleResult, first_largest, sample
from rjax.sampling.seeds import sequence_seed
from rjax.sampling.state import (
    ADMISSIONS,
    Admission,
    SamplingState,
    SlotRow,
    admit,
    init_state,
    lower_admission,
    slot_row,
)
from rjax.sampling.structured_outputs import StructuredOutputsParams

__all__ = [
    "ADMISSIONS",
    "LIMITS",
    "Admission",
    "Argmax",
    "RequestOutputKind",
    "SampleResult",
    "SamplerMode",
    "SamplingLimits",
    "SamplingParams",
    "SamplingState",
    "SlotRow",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "admit",
    "first_largest",
    "init_state",
    "lower_admission",
    "sample",
    "sequence_seed",
    "slot_row",
    "step_mode",
    "token_logprobs",
]
