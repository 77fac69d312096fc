"""Random parameters, for models without a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rjax.models.decoder import Decoder
from rjax.models.schemes.scheme import Initial
from rjax.models.sharding import parameter_sharding

_STANDARD_DEVIATION = 0.02


def fill_randomly(model: Decoder, mesh: Mesh, seed: int) -> Decoder:
    """The model with normal weights (standard deviation 0.02), zero biases and unit norms.

    The same seed gives the same values on any mesh.
    """
    graph, state = nnx.split(model)
    key = jax.random.key(seed)
    filled = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        abstract = leaf.get_value()
        value = _draw(
            jax.random.fold_in(key, i),
            shape=abstract.shape,
            dtype=np.dtype(abstract.dtype),
            initial=leaf.get_metadata("initial"),
            sharding=parameter_sharding(leaf.get_metadata("letters"), abstract.shape, mesh),
        )
        filled.append((path, leaf.replace(value)))
    # A nested state would leave a reference cycle in flax that keeps the weights alive.
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "initial", "sharding"))
def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    initial: Initial,
    sharding: NamedSharding,
) -> jax.Array:
    match initial:
        case "normal":
            value = _STANDARD_DEVIATION * jax.random.normal(key, shape, jnp.float32)
        case "integers":
            limits = jnp.iinfo(dtype)
            value = jax.random.randint(key, shape, limits.min, limits.max + 1)
        case "ones":
            value = jnp.ones(shape, jnp.float32)
        case "zeros":
            value = jnp.zeros(shape, jnp.float32)
        case constant:
            value = jnp.full(shape, constant, jnp.float32)
    return jax.lax.with_sharding_constraint(value.astype(dtype), sharding)
