"""LoRARequest, in the module where vLLM has it."""

from rjax.vllm.names import NO_ADAPTERS, Refused


class LoRARequest(Refused):
    """An adapter of a request in vLLM; making one is refused."""

    reason = NO_ADAPTERS
