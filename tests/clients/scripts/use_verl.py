"""verl: a rollout behind the interface of its wheel, which is all of verl that runs without torch.

`BaseRollout` and `TokenOutput` are the wheel's own source; what their files import besides, such as
torch and Ray, is replaced by empty modules.
"""

import ast
import asyncio
import dataclasses
import importlib.metadata
import sys
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import transformers  # noqa: F401  # before the modules below, one of which it would take for torch
from pydantic import BaseModel
from safetensors.numpy import load_file
from tasks import Asked, run


def source_of(path: str) -> str:
    files = importlib.metadata.files("verl") or []
    [found] = [file for file in files if str(file) == path]
    return Path(found.locate()).read_text()


def module(name: str, **names: Any) -> types.ModuleType:
    found = types.ModuleType(name)
    vars(found).update(names)
    found.__path__ = []
    sys.modules[name] = found
    return found


for name in ("torch", "torch.distributed", "verl.utils", "verl.workers", "verl.workers.rollout"):
    module(name, Tensor=object)
module("torch.distributed.device_mesh", DeviceMesh=object)
module("verl", DataProto=object)
module("verl.utils.config", omega_conf_to_dataclass=lambda config: config)
module("verl.workers.config", HFModelConfig=object, RolloutConfig=object)
base = module("verl.workers.rollout.base")
exec(compile(source_of("verl/workers/rollout/base.py"), "base.py", "exec"), vars(base))  # noqa: S102
replica = module("verl.workers.rollout.replica", BaseModel=BaseModel, Any=Any, Optional=Optional)
[token_output] = [
    node
    for node in ast.parse(source_of("verl/workers/rollout/replica.py")).body
    if isinstance(node, ast.ClassDef) and node.name == "TokenOutput"
]
exec(compile(ast.Module([token_output], []), "replica.py", "exec"), vars(replica))  # noqa: S102
base._ROLLOUT_REGISTRY["rjax", "async"] = "rjax.integrations.verl.RjaxRollout"


@dataclasses.dataclass
class Config:
    """The fields of verl's RolloutConfig that are read, with its names."""

    dtype: str = "float32"
    max_model_len: int | None = None
    prompt_length: int = 64
    response_length: int = 8
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    gpu_memory_utilization: float = 0.5
    tensor_model_parallel_size: int = 1
    enable_prefix_caching: bool = True
    logprobs_mode: str | None = "processed_logprobs"
    load_format: str = "dummy"
    seed: int = 42
    free_cache_engine: bool = True
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    full_determinism: bool = False
    engine_kwargs: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"rjax": {"page_size": 8, "num_pages": 64}}
    )


class Tensor:
    """What the rollout calls of a torch tensor."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def detach(self) -> "Tensor":
        return self

    def clone(self) -> "Tensor":
        return Tensor(self._array.copy())

    def numel(self) -> int:
        return self._array.size

    def element_size(self) -> int:
        return self._array.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def rollout(given: Asked) -> None:
    """Release, resume, update and generate, as a verl step does."""
    weights = load_file(Path(given.model_folder, "model.safetensors"))

    def sent() -> Any:
        """verl reuses the memory of a tensor for the next one."""
        shared = np.zeros(max(a.size for a in weights.values()), np.float32)
        for name, array in weights.items():
            shared[: array.size] = array.reshape(-1)
            yield name, Tensor(shared[: array.size].reshape(array.shape))
            shared[:] = np.nan

    async def sent_async() -> AsyncGenerator[tuple[str, Tensor]]:
        for item in sent():
            yield item

    async def steps() -> None:
        kind = base.get_rollout_class("rjax")
        found = kind(Config(), types.SimpleNamespace(local_path=given.model_folder), None)
        assert isinstance(found, base.BaseRollout)
        prompt, params = list(range(20, 60)), {"temperature": 0.0, "logprobs": True}

        async def ask(name: str, **more: Any) -> Any:
            return await found.generate(prompt, {**params, **more}, name)

        first = await ask("a")
        await found.release()
        await found.resume(["weights"])
        await found.update_weights(sent(), global_steps=1)
        await found.resume(["kv_cache"])
        second = await ask("b")
        assert second.stop_reason == "completed" and len(second.token_ids) == 8
        assert len(second.log_probs) == 8
        assert first.extra_fields["global_steps"] is None
        assert second.extra_fields["global_steps"] == 1
        assert not np.allclose(first.log_probs, second.log_probs, atol=1e-3)
        await found.update_weights(sent_async(), global_steps=2)
        third = await ask("c")
        assert (third.token_ids, third.log_probs) == (second.token_ids, second.log_probs)
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
        for broken in (sent(), iter(list(sent())[:3])):
            update = asyncio.create_task(found.update_weights(broken, global_steps=3))
            await asyncio.wait([update])
            assert "model." in str(update.exception()), update
        fourth = await ask("d", max_tokens=3)
        assert fourth.token_ids == second.token_ids[:3]
        assert fourth.extra_fields["global_steps"] == 2
        await found.llm.close()

    asyncio.run(steps())


run(rollout)
