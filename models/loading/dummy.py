"""Random parameters, for models without a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rjax.models.decoder import Decoder
from rjax.models.layers.parameter import variable_sharding
from rjax.models.placement import bytes_of_device, copy_kv_heads
from rjax.models.schemes.scheme import Initial

_STANDARD_DEVIATION = 0.02


def fill_randomly(model: Decoder, mesh: Mesh, seed: int) -> Decoder:
    """The model with normal weights (standard deviation 0.02), zero biases and unit norms.

    The same seed gives the same values on any mesh.

    Raises ValueError if the devices cannot divide the parameters.
    """
    bytes_of_device(model, mesh)
    graph, state = nnx.split(model)
    key = jax.random.key(seed)
    filled = []
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        abstract = leaf.get_value()
        letters = leaf.get_metadata("letters")
        value = _draw(
            jax.random.fold_in(key, i),
            shape=abstract.shape,
            dtype=np.dtype(abstract.dtype),
            initial=leaf.get_metadata("initial"),
            sharding=variable_sharding(leaf, mesh),
            letters=letters,
            copies=model.config.kv_head_copies,
        )
        filled.append((path, leaf.replace(value)))
    # A nested state would leave a reference cycle in flax that keeps the weights alive.
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


@functools.partial(
    jax.jit, static_argnames=("shape", "dtype", "initial", "sharding", "letters", "copies")
)
def _draw(
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    initial: Initial,
    sharding: NamedSharding,
    letters: str,
    copies: int,
) -> jax.Array:
    # Queries, keys and values are drawn as one device holds them.
    copied = copies > 1 and "K A" in letters and initial in ("normal", "integers")
    if copied:
        k = letters.split().index("K")
        K, A = shape[k] // copies, (shape[k + 1] - 2) * copies + 2
        shape = (*shape[:k], K, A, *shape[k + 2 :])
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
    if copied:
        value = copy_kv_heads(value, letters, copies)
    return jax.lax.with_sharding_constraint(value.astype(dtype), sharding)
