"""Chooses devices, dtypes and kernels of an engine, and then its limits and step shapes."""

import dataclasses
import logging

import jax
import jax.numpy as jnp

from rjax.batch.step_limits import StepLimits, choose_step_limits
from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.models import (
    Decoder,
    ModelConfig,
    bytes_of_device,
    place,
    with_dequantised_weights,
)
from rjax.worker.backend import choose_backend, compute_capability
from rjax.worker.dtype import choose_dtype, choose_kv_dtype
from rjax.worker.engine_plan import EnginePlan, EnginePlatform
from rjax.worker.kernels.uses import advise_whole_experts
from rjax.worker.nccl import check_nccl
from rjax.worker.pages.sizing import gpu_pool_tokens

_SMALL_PROJECTION = 2**24
"""Weights of the largest projection; with fewer, kernels gain nothing from few bits.

The limit lies between Qwen2.5-0.5B (8.7 million), which is not faster in fp8 or int4, and
Qwen2.5-3B (45 million)."""
_log = logging.getLogger("rjax")
_SMALL_SHARE = 0.05  # of a device's memory, for the weights in the model's dtype


def choose_weights(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the weights that an engine holds: quantised, or in the model's dtype.

    Args:
        config: the engine's options; ``dequantize`` decides.
        model: the model as its checkpoint and ``quantization`` say.
    """
    if not model.schemes or config.model.dequantize == "off":
        return model
    dequantised = with_dequantised_weights(model)
    if config.model.dequantize == "on":
        return dequantised
    device = jax.devices()[0]
    faster = dequantised_is_faster(
        dequantised,
        choose_dtype(config.model.dtype, model, device.platform),
        compute_capability=compute_capability(device),
        memory_bytes=(device.memory_stats() or {}).get("bytes_limit", 0),
        devices=config.tensor_parallel_size,
    )
    return dequantised if faster else model


def dequantised_is_faster(
    model: ModelConfig,
    dtype: jnp.dtype,
    *,
    compute_capability: float | None,
    memory_bytes: int,
    devices: int,
) -> bool:
    """Whether quantised kernels would not pay, and the weights in ``dtype`` take little memory.

    Args:
        model: the model with its weights in ``dtype``.
        dtype: dtype of the weights.
        compute_capability: compute capability of the devices.
        memory_bytes: bytes of one device's memory.
        devices: number of devices that share the weights.
    """
    if compute_capability is None or not 9 <= compute_capability < 10:
        return False
    if model.experts is not None:
        return False  # a step of many rows reads nearly all of them
    outputs = max(model.widest_qkv, model.widest_mlp * (2 if model.gated_mlp else 1))
    if model.hidden_size * outputs // devices >= _SMALL_PROJECTION:
        return False
    return Decoder(model, dtype).weight_bytes / devices < _SMALL_SHARE * memory_bytes


def choose_platform(config: EngineConfig, model: ModelConfig, max_model_len: int) -> EnginePlatform:
    """The devices, dtypes and kernels for a model.

    Args:
        config: the engine's options.
        model: its model, as `choose_weights` gives it.
        max_model_len: tokens of the longest sequence.

    Raises:
        InvalidConfigError: JAX has several processes, there are too few devices, they cannot share
            the model, NCCL is too old, or the backend cannot run it.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise InvalidConfigError(
            f"jax.distributed has started {jax.process_count()} processes; an engine runs in one "
            "process with the devices of its host. Do not call jax.distributed.initialize, and "
            "start one server for each host"
        )
    if config.tensor_parallel_size > len(devices):
        raise InvalidConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; there are {len(devices)} "
            "devices"
        )
    if config.tensor_parallel_size > 1 and devices[0].platform == "gpu":
        check_nccl()
    mesh = jax.make_mesh(
        (config.tensor_parallel_size,),
        ("tensor",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.tensor_parallel_size],
    )
    dtype = choose_dtype(config.model.dtype, model, devices[0].platform)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, dtype)
    try:
        model = place(model, mesh.size, expert_parallel=config.enable_expert_parallel)
        weight_bytes = bytes_of_device(Decoder(model, dtype), mesh)
    except ValueError as error:
        option = "enable_expert_parallel is set, and " if config.enable_expert_parallel else ""
        raise InvalidConfigError(f"{option}tensor_parallel_size is {mesh.size}: {error}") from error
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
    advice = advise_whole_experts(backend, model, dtype, mesh.size)
    if advice is not None:
        _log.warning("%s", advice)
    return EnginePlatform(
        config=config,
        model=model,
        max_model_len=max_model_len,
        mesh=mesh,
        weight_bytes=weight_bytes,
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=backend,
    )


def plan_engine(platform: EnginePlatform) -> EnginePlan:
    """The plan with the limits of a step, of which some have defaults for devices and kernels.

    On a GPU they follow the memory that is free now, so an engine plans after it has loaded the
    weights.
    """
    config = platform.config
    memory = platform.first_device.memory_stats() or {}

    def pool_tokens(limits: StepLimits) -> int:
        return gpu_pool_tokens(
            config,
            platform.model,
            platform.shapes_for(limits),
            limits=limits,
            dtype=platform.dtype,
            kv_dtype=platform.kv_dtype,
            memory=memory,
            num_devices=platform.mesh.size,
        )

    limits = choose_step_limits(
        config.scheduler,
        most_tokens=512 if platform.is_cpu else 2048,
        spare_rows=platform.backend.spare_rows,
        max_model_len=platform.max_model_len,
        pool_tokens=pool_tokens if "bytes_limit" in memory else None,
    )
    known = {field.name: getattr(platform, field.name) for field in dataclasses.fields(platform)}
    return EnginePlan(**known, limits=limits, shapes=platform.shapes_for(limits))
