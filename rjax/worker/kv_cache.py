"""The arrays of the KV pool, and bytes of a page."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from rjax.batch.page_groups import PageGroups
from rjax.models import ModelConfig

type Pools = list[Float[Array, "P K S H"]]


def num_pools(config: ModelConfig, groups: PageGroups | None) -> int:
    """K arrays of the pool: one for each layer, or for each layer of the largest page group."""
    return config.num_layers if groups is None else groups.num_pools


def page_bytes(
    config: ModelConfig, page_size: int, dtype: jnp.dtype, groups: PageGroups | None = None
) -> int:
    """Bytes of one page over all layers of a page group, K and V together."""
    heads = num_pools(config, groups) * config.num_kv_heads * config.head_dim
    return 2 * heads * page_size * jnp.dtype(dtype).itemsize


def make_pools(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    groups: PageGroups | None = None,
) -> tuple[Pools, Pools]:
    """`num_pools` K and V pools of zeros, sharded over K on the mesh axis ``tensor``."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    count = num_pools(config, groups)
    return [zeros() for _ in range(count)], [zeros() for _ in range(count)]
