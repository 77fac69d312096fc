"""Devices, dtypes and kernels of an engine, chosen before its weights are loaded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rjax.batch.step_limits import StepLimits, choose_step_limits
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.models import ModelConfig
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.dtype import choose_dtype, choose_kv_dtype
from rjax.worker.step_sizing import gpu_pool_tokens, shape_table


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePlatform:
    """What an engine runs on.

    Attributes:
        mesh: its devices.
        dtype: of the weights.
        kv_dtype: of the KV pool.
        backend: its kernels.
    """

    mesh: Mesh
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    backend: Backend

    @property
    def first_device(self) -> Any:
        """The first of its devices, which are all alike."""
        return self.mesh.devices.flat[0]

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.first_device.platform == "cpu"

    @property
    def description(self) -> str:
        """Number and kind of the devices."""
        return f"{self.mesh.size} x {self.first_device.device_kind}"

    @property
    def growth(self) -> int:
        """Ratio of one step size to the next smaller one: padding costs a CPU more to compute, but
        less than compiling a size."""
        return 4 if self.is_cpu else 2

    def step_limits(
        self, config: EngineConfig, model: ModelConfig, *, max_model_len: int
    ) -> StepLimits:
        """The limits of a step, with the defaults for these devices and kernels.

        On a GPU they follow the memory that is free now, so an engine asks after it has loaded the
        weights.

        Args:
            config: of the engine.
            model: its model.
            max_model_len: tokens of the longest sequence.
        """
        memory = self.first_device.memory_stats() or {}

        def pool_tokens(limits: StepLimits) -> int:
            shapes = shape_table(
                config,
                backend=self.backend,
                max_model_len=max_model_len,
                limits=limits,
                growth=self.growth,
            )
            return gpu_pool_tokens(
                config,
                model,
                shapes,
                limits=limits,
                dtype=self.dtype,
                kv_dtype=self.kv_dtype,
                memory=memory,
                num_devices=self.mesh.size,
            )

        return choose_step_limits(
            config.scheduler,
            most_tokens=512 if self.is_cpu else 2048,
            spare_rows=self.backend.spare_rows,
            max_model_len=max_model_len,
            pool_tokens=pool_tokens if "bytes_limit" in memory else None,
        )


def choose_platform(config: EngineConfig, model: ModelConfig) -> EnginePlatform:
    """The devices, dtypes and kernels for a model.

    Raises:
        InvalidConfigError: there are too few devices, or the backend cannot run the model.
    """
    devices = jax.devices()
    if config.tensor_parallel_size > len(devices):
        raise InvalidConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; there are {len(devices)} "
            "devices"
        )
    mesh = jax.make_mesh(
        (config.tensor_parallel_size,),
        ("tensor",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.tensor_parallel_size],
    )
    dtype = choose_dtype(config.model.dtype, model, devices[0].platform)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, dtype)
    backend = choose_backend(
        config.backend,
        platform=devices[0].platform,
        compute_capability=compute_capability(devices[0]),
        model=model,
        dtype=dtype,
        page_size=config.cache.page_size,
        kv_dtype=kv_dtype,
        devices=mesh.size,
    )
    return EnginePlatform(mesh, dtype, kv_dtype, backend)


def compute_capability(device: Any) -> float | None:
    """Of an NVIDIA GPU, such as 9.0 for Hopper; None for other devices."""
    found = getattr(device, "compute_capability", None)
    return None if found is None else float(found)
