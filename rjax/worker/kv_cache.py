"""The pool of KV pages: how large it can be, and its arrays."""

import dataclasses
import math
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from models import ModelConfig
from rjax.errors import OutOfMemoryError

_CPU_SHARE = 0.1  # of the host memory that is free: a CPU engine is a guest on its machine


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSize:
    """Pages of the pool and bytes of one page over all layers, K and V together."""

    num_pages: int
    page_bytes: int


def page_bytes(config: ModelConfig, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes that one page takes in all layers, K and V."""
    heads = config.num_layers * config.num_kv_heads * config.head_dim
    return 2 * heads * page_size * jnp.dtype(dtype).itemsize


def fit_pool(
    *,
    bytes_per_page: int,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    memory: Mapping[str, int] | None,
    num_devices: int,
    utilization: float,
    workspace_bytes: int,
) -> PoolSize:
    """Size the pool by the memory that weights and a largest step leave.

    On a GPU: ``utilization`` of the device's memory, less what is in use, less ``workspace_bytes``.
    On a CPU, which has no ``memory`` statistics: a tenth of the free host memory. Never more than
    all sequences at full length need.

    Raises:
        OutOfMemoryError: not even one sequence of ``max_model_len`` tokens fits.
    """
    if memory and "bytes_limit" in memory:
        budget = int(memory["bytes_limit"] * utilization) - memory["bytes_in_use"]
        budget -= workspace_bytes
        budget *= num_devices
    else:
        budget = int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
    one = math.ceil(max_model_len / page_size)
    pages = min(budget // bytes_per_page, max_num_seqs * one)
    if pages < one:
        raise OutOfMemoryError(
            f"{max(budget, 0) / 2**20:.0f} MiB are left for KV, which holds "
            f"{max(pages, 0) * page_size} tokens; one sequence of max_model_len = {max_model_len} "
            f"needs {one * bytes_per_page / 2**20:.0f} MiB: lower max_model_len, or free memory, "
            "or raise gpu_memory_utilization"
        )
    return PoolSize(pages, bytes_per_page)


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
