"""Modules that scripts import from vLLM's package: where rjax has their names, or what takes their
place.

`install` makes ``from rjax.v1.engine.async_llm import AsyncLLM`` work, and gives the reason where a
module of vLLM has no counterpart. Modules that rjax has under vLLM's name, such as `rjax.inputs`,
are files.
"""

import gc
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from rjax.vllm.names import NO_CODE, NO_POOLING, ONE_PROCESS, STATS, TEXT_ONLY

HOMES: dict[str, dict[str, str]] = {
    "distributed": {"cleanup_dist_env_and_memory": "rjax.vllm.modules"},
    "engine.async_llm_engine": {"AsyncLLMEngine": "rjax"},
    "entrypoints.llm": {"LLM": "rjax"},
    "logger": {"init_logger": "logging:getLogger"},
    "v1.core.kv_cache_utils": {"ExternalBlockHash": "rjax.vllm.modules"},
    "v1.engine.async_llm": {"AsyncLLM": "rjax"},
    "v1.engine.llm_engine": {"LLMEngine": "rjax"},
}
"""Modules of vLLM, without its name in front, with the module that has each of their names, and its
name there if it is another."""

MISSING: dict[str, str] = {
    "assets": TEXT_ONLY,
    "benchmarks.datasets": "'rjax bench' has its own workloads",
    "config.kv_transfer": "KV is sent to no other engine",
    "distributed.kv_transfer": "KV is sent to no other engine",
    "distributed.parallel_state": ONE_PROCESS,
    "distributed.weight_transfer": "LLM.update_weights takes a trainer's arrays",
    "envs": "options are arguments, not environment variables",
    "model_executor": "the families of rjax.models take the place of vLLM's models",
    "multimodal": TEXT_ONLY,
    "platforms": "jax.default_backend() names the platform",
    "pooling_params": NO_POOLING,
    "renderers": "LLM.chat renders prompts, with chat_template",
    "tokenizers": "LLM.get_tokenizer gives the tokenizer",
    "transformers_utils": "LLM.get_tokenizer gives the tokenizer",
    "usage": "no usage is reported",
    "utils.print_utils": NO_POOLING,
    "utils.serial_utils": TEXT_ONLY,
    "utils": "rjax has its FlexibleArgumentParser alone",
    "v1.executor": ONE_PROCESS,
    "v1.metrics": STATS,
    "v1.sample": NO_CODE,
    "v1.worker": ONE_PROCESS,
}
"""Other modules and packages of vLLM, with what takes their place."""

ExternalBlockHash = bytes | int
"""Type of a page's hash in KV events, as vLLM's subscribers declare it; rjax sends bytes."""


class VllmModules(MetaPathFinder, Loader):
    """Finds the modules of `HOMES`, and says why those of `MISSING` are not there."""

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's specification; None for a name that vLLM does not have either.

        Raises:
            ModuleNotFoundError: the module is of `MISSING`.
        """
        package, _, name = fullname.partition(".")
        if package != "rjax":
            return None
        if any(f"{home}.".startswith(f"{name}.") for home in HOMES):
            return ModuleSpec(fullname, self, is_package=True)
        for missing, instead in MISSING.items():
            if f"{name}.".startswith(f"{missing}."):
                raise ModuleNotFoundError(f"rjax has no module {name}: {instead}", name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the names of `HOMES` into the module."""
        for name, home in HOMES.get(module.__name__.partition(".")[2], {}).items():
            place, _, other = home.partition(":")
            setattr(module, name, getattr(importlib.import_module(place), other or name))


def install() -> None:
    """Let imports find `HOMES` and `MISSING`, after all modules that are files."""
    if not any(isinstance(finder, VllmModules) for finder in sys.meta_path):
        sys.meta_path.append(VllmModules())


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of all that the program no longer refers to. rjax has no process groups, and
    ``shutdown_ray`` has no effect on a program that started no Ray."""
    gc.collect()
