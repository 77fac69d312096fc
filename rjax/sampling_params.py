"""The parameters of requests, in the module where vLLM has them."""

from rjax.api.beam_search import BeamSearchParams
from rjax.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams
from rjax.vllm.names import Refused

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]


class GuidedDecodingParams(Refused):
    """The former name of `StructuredOutputsParams` in vLLM; making one is refused."""

    reason = "use StructuredOutputsParams, and SamplingParams(structured_outputs=...)"
