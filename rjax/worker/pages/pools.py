"""The arrays of the KV pool, and bytes of a page."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from rjax.batch.page_groups import PageGroups
from rjax.models import ModelConfig

type Pools = list[Float[Array, "P K S H"]]


def page_bytes(config: ModelConfig, groups: PageGroups, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page over all layers of a page group, K and V together."""
    heads = groups.num_pools * config.num_kv_heads * config.head_dim
    return 2 * heads * page_size * jnp.dtype(dtype).itemsize


def make_pools(
    config: ModelConfig,
    groups: PageGroups,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
) -> tuple[Pools, Pools]:
    """K and V pools of zeros for all groups, sharded over K on the mesh axis ``tensor``."""
    shape = (num_pages, config.num_kv_heads, page_size, config.head_dim)
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    k_pages, v_pages = ([zeros() for _ in range(groups.num_pools)] for _ in range(2))
    return k_pages, v_pages
