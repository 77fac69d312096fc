"""The arrays of the KV pool, and bytes of a page."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from rjax.batch.page_groups import STATES, PageGroups
from rjax.models import ModelConfig

type Pools = list[Float[Array, "P K S H"]]


def page_shape(config: ModelConfig, groups: PageGroups, page_size: int) -> tuple[int, int, int]:
    """Shape of a page of one array, (K, S, H).

    K counts the heads of all layers that the page holds, in the group that needs the fewest. The
    numbers of a device's heads are those of its layers one after the other; layers of other groups
    have them in a shape of their own.
    """
    heads = config.layer_heads
    layers = [i for i, (group, _) in enumerate(groups.layers) if group != STATES]
    layer = min(layers, key=lambda layer: groups.place(layer).parts)
    K, H = heads[layer]
    return groups.place(layer).parts * K, page_size, H


def page_bytes(config: ModelConfig, groups: PageGroups, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers of a page group, K and V together."""
    numbers = groups.num_pools * math.prod(page_shape(config, groups, page_size))
    return 2 * numbers * jnp.dtype(dtype).itemsize


def make_pools(
    config: ModelConfig,
    groups: PageGroups,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> tuple[Pools, Pools]:
    """K and V pools of zeros for all groups, sharded over K on the mesh axis ``tensor``."""
    shape = (num_pages, *page_shape(config, groups, page_size))
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
    zeros = _zeros(shape, jnp.dtype(dtype), sharding)
    k_pages, v_pages = ([zeros() for _ in range(groups.num_pools)] for _ in range(2))
    return k_pages, v_pages


@functools.lru_cache(maxsize=8)  # a pool that is made again needs no compilation
def _zeros(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> Callable[[], Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
