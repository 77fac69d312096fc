"""The pool of KV pages: how large it can be, and its arrays."""

import math
import pathlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models import ModelConfig
from rjax.batch.step_worker import PoolSize
from rjax.errors import OutOfMemoryError
from rjax.memory_sizes import available_memory, host_memory

_MOST_SHARE = 0.98  # of a device's memory that is advised
_CPU_SHARE = 0.1  # of the host's memory: a CPU engine is a guest on its machine
_FREE_SHARE = 0.5  # of what is free of it
_GPU_STEPS = 64  # sizes between two powers of two: rounding loses 1/64 at most
_CPU_STEPS = 8


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes in all layers, K and V."""
    heads = config.num_layers * config.num_kv_heads * config.head_dim
    return 2 * heads * page_size * jnp.dtype(dtype).itemsize


def fit_pool(
    *,
    bytes_per_page: int,
    page_size: int,
    max_model_len: int,
    num_seqs: int,
    memory: Mapping[str, int] | None,
    num_devices: int,
    utilization: float,
    workspace_bytes: int,
) -> PoolSize:
    """Size the pool by the memory that weights and a largest step leave.

    On a GPU: ``utilization`` of the device's memory, less what is in use, less ``workspace_bytes``.
    On a CPU, which has no ``memory`` statistics: a tenth of the host's memory, and no more than
    half of what is free. Never more than ``num_seqs`` sequences of full length need.

    The number of pages is in the shapes of every compiled step, so that a start compiles nothing
    only where it finds the same number as one before. It is rounded down, to one of 64 numbers
    between two powers of two on a GPU, where a few MiB of what is in use differ from start to
    start; to one of 8 on a CPU, and to a power of two where little of the host's memory is free.

    Raises:
        OutOfMemoryError: not even one sequence of ``max_model_len`` tokens fits.
    """
    if memory and "bytes_limit" in memory:
        taken = memory["bytes_in_use"] + workspace_bytes
        budget = (int(memory["bytes_limit"] * utilization) - taken) * num_devices
        steps = _GPU_STEPS
    else:
        taken = 0
        budget, free = int(host_memory() * _CPU_SHARE), int(available_memory() * _FREE_SHARE)
        steps = _CPU_STEPS if budget <= free else 1
        budget = min(budget, free)
    one = math.ceil(max_model_len / page_size)
    pages = max(0, budget // bytes_per_page)
    pages = min(max(round_down(pages, steps), min(pages, one)), num_seqs * one)
    if pages < one:
        needed = one * bytes_per_page
        remedies = []
        if pages:
            remedies.append(f"lower max_model_len to {pages * page_size} or less")
        if memory and "bytes_limit" in memory:
            share = (needed / num_devices + taken) / memory["bytes_limit"]
            if share <= _MOST_SHARE:
                remedies.append(f"raise gpu_memory_utilization to {math.ceil(share * 100) / 100}")
            remedies.append("lower max_num_batched_tokens, or raise tensor_parallel_size")
        else:
            remedies.append("free memory, or set num_pages")
        raise OutOfMemoryError(
            f"{max(budget, 0) / 2**20:.0f} MiB are left for KV, which holds {pages * page_size} "
            f"tokens; one sequence of max_model_len = {max_model_len} needs "
            f"{needed / 2**20:.0f} MiB: {'; '.join(remedies)}"
        )
    return PoolSize(pages, bytes_per_page)


def round_down(pages: int, steps: int) -> int:
    """The largest of ``steps`` numbers of pages between two powers of two that is not above."""
    unit = max(1, (1 << max(pages, 1).bit_length() - 1) // steps)
    return pages // unit * unit


def check_pool_fits(pool: PoolSize, *, memory: Mapping[str, int] | None, num_devices: int) -> None:
    """Refuse a pool of a size that was asked for, before the device tries to find room for it.

    Args:
        pool: its size.
        memory: of one device, weights loaded; without it (a CPU) nothing is checked.
        num_devices: that the pool is cut over.

    Raises:
        OutOfMemoryError: it is larger than what is left; the message says how many pages are not.
    """
    if not memory or "bytes_limit" not in memory:
        return
    room = (memory["bytes_limit"] - memory["bytes_in_use"]) * num_devices
    if pool.num_pages * pool.page_bytes > room:
        raise OutOfMemoryError(
            f"num_pages is {pool.num_pages}, which takes "
            f"{pool.num_pages * pool.page_bytes / 2**30:.1f} GiB, and {num_devices} device(s) have "
            f"{room / 2**30:.1f} GiB to give: set num_pages below {room // pool.page_bytes}, since "
            "a step needs memory too, or leave it out, and the pool takes what is left"
        )


def check_weights_fit(
    folder: pathlib.Path,
    *,
    growth: float,
    memory: Mapping[str, int] | None,
    num_devices: int,
    utilization: float,
) -> None:
    """Refuse a model whose weights do not fit, before they are loaded.

    Args:
        folder: of the checkpoint; its safetensors files are its size.
        growth: bytes of a value as served, of its bytes in the checkpoint.
        memory: of one device; without it (a CPU) nothing is checked.
        num_devices: that the weights are cut over.
        utilization: share of the memory that may be used.

    Raises:
        OutOfMemoryError: they do not fit; the message says on how many devices they would.
    """
    if not memory or "bytes_limit" not in memory:
        return
    weights = growth * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    room = memory["bytes_limit"] * utilization - memory["bytes_in_use"]
    if weights > room * num_devices:
        share = (weights / num_devices + memory["bytes_in_use"]) / memory["bytes_limit"]
        remedies = []
        if share <= _MOST_SHARE:
            remedies.append(f"raise gpu_memory_utilization above {share:.2f}")
        if room > 0:
            devices = 1 << (math.ceil(weights / room) - 1).bit_length()
            remedies.append(f"set tensor_parallel_size={devices}")
        else:
            remedies.append("free device memory")
        remedies.append("choose a 16-bit dtype or a smaller model")
        raise OutOfMemoryError(
            f"the weights take {weights / 2**30:.1f} GiB and {num_devices} device(s) have "
            f"{max(room, 0) * num_devices / 2**30:.1f} GiB to give: {', or '.join(remedies)}"
        )


def make_pools(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh
) -> tuple[list[Float[Array, "P K S H"]], list[Float[Array, "P K S H"]]]:
    """One K and one V pool a layer, zeros, cut over K on the mesh axis ``tensor``."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return (
        [zeros() for _ in range(config.num_layers)],
        [zeros() for _ in range(config.num_layers)],
    )
