"""What TRL imports of vLLM in its server mode; no part of vLLM.

TRL 1.16 imports vLLM for the sending side of its weight transfer. The functions here have the names
and arguments of vLLM 0.31, and send to `rjax serve` through shared memory instead of NCCL; see
`shared_memory.py`. The engine of vLLM is not here: its names can be imported, and refuse to work.
"""

from typing import Any

__version__ = "0.31.0"


class _Absent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"vllm.{type(self).__name__} is not in this stub, which only sends weights; use "
            "vllm_mode='server' with `rjax serve`"
        )


class LLM(_Absent):
    """Absent."""


class RequestOutput(_Absent):
    """Absent."""


class SamplingParams(_Absent):
    """Absent."""
