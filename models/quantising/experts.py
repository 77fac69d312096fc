"""The experts of a layer in one tensor, quantised to MXFP4."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rjax.models.errors import CheckpointError
from rjax.models.formats.mxfp4 import stored_experts
from rjax.models.schemes import MXFP4


def quantise_experts(
    tensor: str, weight: Float[np.ndarray, "J E X"]
) -> tuple[dict[str, np.ndarray], float]:
    """(tensors of the checkpoint, relative error) of a weight, rounded as on load.

    Args:
        tensor: its name.
        weight: (experts, inputs, outputs).

    Raises:
        CheckpointError: a value is not finite.
    """
    values, exponents, error, size = [], [], 0.0, 0.0
    for expert in weight:
        plain = expert.T.astype(np.float32)
        if not np.isfinite(plain).all():
            raise CheckpointError(f"tensor {tensor!r} has values that are not finite")
        *leaves, of_difference, of_weight = _quantised(jnp.asarray(plain))
        values.append(np.asarray(leaves[0]).astype(np.int8))
        exponents.append(np.asarray(leaves[1]))
        error += float(of_difference)
        size += float(of_weight)
    stored = stored_experts(tensor, np.stack(values), np.stack(exponents))
    return stored, (error / size) ** 0.5 if size > 0 else 0.0


@jax.jit
def _quantised(weight: Float[Array, "X E"]) -> tuple[Array, Array, Array, Array]:
    """(values, exponents, squared norm of the error, that of the weight) of one expert."""
    _, columns = MXFP4.block
    assert columns is not None
    leaves = MXFP4.quantise(weight, (1, columns))
    difference = MXFP4.widened(leaves) - weight
    squares = jnp.square(difference).sum(), jnp.square(weight).sum()
    return leaves["weight"], leaves["weight_scale"], *squares
