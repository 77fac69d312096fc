"""The options of an engine, and the other limits that users set.

- `engine_config`: the dataclasses of the options; `option_docs` reads their documentation.
- `kv_events`: the options of KV events. `memory_sizes`: sizes as users write them.
- `quantization_names`: the names of the option ``quantization``, from what is registered.
- `sampling_limits`: the limits of a request's sampling parameters.
"""

from typing import Any

from rjax.config.engine_config import (
    GROUPS,
    PAGE_SIZES,
    AutoInt,
    CacheSettings,
    DType,
    EngineConfig,
    KVCacheDType,
    RelayMode,
    RelaySettings,
    SchedulerSettings,
    Warmup,
)
from rjax.vllm.names import CONFIG_CLASSES, config_class

__all__ = [
    "GROUPS",
    "PAGE_SIZES",
    "AutoInt",
    "CacheSettings",
    "DType",
    "EngineConfig",
    "KVCacheDType",
    "RelayMode",
    "RelaySettings",
    "SchedulerSettings",
    "Warmup",
]


def __getattr__(name: str) -> Any:
    if name in CONFIG_CLASSES:
        return config_class(name)
    raise AttributeError(f"module 'rjax.config' has no attribute {name!r}")
