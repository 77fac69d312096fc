"""The token of the largest logit, where devices share the vocabulary."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int

from rjax.models.sharding import TENSOR_AXIS, partition_spec
from rjax.sampling import Argmax


def sharded_argmax(mesh: Mesh) -> Argmax:
    """``jnp.argmax`` over V of logits that are sharded as the step's, with one collective.

    Each device finds the largest of its part; one all-gather carries values and tokens. Of equal
    logits the first counts.
    """

    def argmax(logits: Float32[Array, "B V"]) -> Int[Array, " B"]:
        spec = partition_spec("B V", logits.shape, mesh)
        if spec[1] is None:  # every device has all logits
            return jnp.argmax(logits, axis=-1)
        return jax.shard_map(
            functools.partial(_argmax, width=logits.shape[1] // mesh.shape[TENSOR_AXIS]),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
            check_vma=False,
        )(logits)

    return argmax


def _argmax(logits: Float32[Array, "B W"], width: int) -> Int[Array, " B"]:
    first = lax.axis_index(TENSOR_AXIS) * width
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32) + first
    bits = lax.bitcast_convert_type(jnp.max(logits, axis=-1), jnp.int32)
    found = lax.all_gather(jnp.stack([bits, tokens]), TENSOR_AXIS)  # [devices, 2, B]
    values = lax.bitcast_convert_type(found[:, 0], jnp.float32)
    device = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(found[:, 1], device[None], axis=0)[0]
