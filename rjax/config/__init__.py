"""The options of an engine, and the other limits that users set.

- `engine_config`: the dataclasses of the options; `option_docs` reads their documentation.
- `kv_events`: the options of KV events. `memory_sizes`: sizes as users write them.
- `quantization_names`: the names of the option ``quantization``, from what is registered.
- `sampling_limits`: the limits of a request's sampling parameters.
"""

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
