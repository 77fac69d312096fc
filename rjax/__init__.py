"""rjax: LLM inference in JAX that reads a shared prompt once.

``from rjax import LLM, SamplingParams`` is all that offline use needs. Names load when first used,
so that ``import rjax`` alone stays quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rjax.vllm.modules import install as _find_modules_of_vllm

if TYPE_CHECKING:
    from rjax.api.async_llm import AsyncLLM
    from rjax.api.async_llm import AsyncLLM as AsyncLLMEngine  # an alias, as in vLLM
    from rjax.api.beam_search import BeamSearchParams
    from rjax.api.llm import LLM
    from rjax.api.llm_engine import LLMEngine
    from rjax.api.scoring import ScoreOutput
    from rjax.config import EngineConfig
    from rjax.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from rjax.errors import (
        ContextLengthError,
        InvalidConfigError,
        InvalidRequestError,
        InvalidWeightsError,
        OutOfMemoryError,
        RjaxError,
    )
    from rjax.inputs import PromptType, TextPrompt, TokensPrompt
    from rjax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from rjax.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ContextLengthError",
    "EngineArgs",
    "EngineConfig",
    "InvalidConfigError",
    "InvalidRequestError",
    "InvalidWeightsError",
    "LLMEngine",
    "Logprob",
    "OutOfMemoryError",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RjaxError",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOME = {
    "LLM": "rjax.api.llm",
    "LLMEngine": "rjax.api.llm_engine",
    "AsyncLLM": "rjax.api.async_llm",
    "AsyncLLMEngine": "rjax.api.async_llm:AsyncLLM",
    "BeamSearchParams": "rjax.api.beam_search",
    "EngineConfig": "rjax.config",
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), "rjax.engine.arg_utils"),
    "PoolingParams": "rjax.vllm.names",
    **dict.fromkeys(("PromptType", "TextPrompt", "TokensPrompt"), "rjax.inputs"),
    "SamplingParams": "rjax.sampling",
    "RequestOutputKind": "rjax.sampling",
    "ScoreOutput": "rjax.api.scoring",
    "StructuredOutputsParams": "rjax.sampling",
    **dict.fromkeys(
        ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"), "rjax.outputs"
    ),
    **dict.fromkeys(
        (
            *("ContextLengthError", "InvalidConfigError", "InvalidRequestError"),
            *("InvalidWeightsError", "OutOfMemoryError", "RjaxError"),
        ),
        "rjax.errors",
    ),
}

_find_modules_of_vllm()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rjax' has no attribute {name!r}")
    home, _, other = _HOME[name].partition(":")
    return getattr(importlib.import_module(home), other or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
