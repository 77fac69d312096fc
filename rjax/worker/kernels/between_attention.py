"""The kernel from one attention to the next: the problem it is chosen by, and its operands."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import DecoderLayer, Linear
from rjax.models.layers.attention import Attention
from rjax.models.layers.mlp import Mlp
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.between_attention import mosaic
from rjax.pallas_kernels.between_attention.arrivals import Arrivals
from rjax.pallas_kernels.between_attention.mosaic import BetweenWeights
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.kernel import Kernel
from rjax.worker.kernels.layer_problem import plain_parts
from rjax.worker.kernels.problem import Problem


def between_problem(
    layer: DecoderLayer,
    following: DecoderLayer | None,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
) -> Problem | None:
    """The problem by which a kernel is chosen; None if no kernel computes all between attentions.

    Such kernels know layers of `plain_parts` with unquantised weights.
    """
    parts = _parts(layer)
    if parts is None:
        return None
    attention, mlp = parts
    norms, columns = [layer.mlp_norm], [attention.output.depth, mlp.down.depth]
    if following is not None:
        next_parts = _parts(following)
        if next_parts is None:
            return None
        norms.append(following.attention_norm)
        columns.append(math.prod(next_parts[0].qkv.output_shape))
    eps = {norm.eps for norm in norms if norm is not None}
    if len(eps) != 1:
        return None
    return Problem(
        operation="between_attention",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        depth=mlp.up.depth,
        columns=tuple(columns),
        scheme=UNQUANTISED,
        early_weights=early_weights,
        eps=eps.pop(),
    )


def _parts(layer: DecoderLayer) -> tuple[Attention, Mlp] | None:
    parts = plain_parts(layer)
    return parts if parts is not None and parts[0].qkv.scheme == UNQUANTISED else None


def between_weights(layer: DecoderLayer, following: DecoderLayer | None) -> BetweenWeights:
    """The arrays of layers that have a `between_problem`."""
    parts = _parts(layer)
    assert parts is not None and layer.mlp_norm is not None
    attention, mlp = parts
    next_norm = next_qkv = None
    if following is not None:
        next_parts = _parts(following)
        assert next_parts is not None and following.attention_norm is not None
        next_norm = following.attention_norm.weight[...]
        next_qkv = _matrix(next_parts[0].qkv)
    return BetweenWeights(
        output=_matrix(attention.output),
        mlp_norm=layer.mlp_norm.weight[...],
        gate_up=mlp.up.leaves["weight"],
        down=_matrix(mlp.down),
        next_norm=next_norm,
        next_qkv=next_qkv,
    )


def _matrix(linear: Linear) -> Array:
    return linear.leaves["weight"].reshape(linear.depth, -1)


def _refusal(problem: Problem) -> str | None:
    E, F, *following = problem.columns
    Q = following[0] if following else None
    return mosaic.refusal(problem.rows, problem.depth, E, F, Q, problem.dtype)


def _run(
    problem: Problem, x: Array, attended: Array, weights: BetweenWeights, arrivals: Arrivals
) -> tuple[Array, Partial, Arrivals]:
    return mosaic.between_attention(
        x, attended, weights, arrivals, problem.eps, early_weights=problem.early_weights
    )


BETWEEN_ATTENTION = Kernel(
    "mosaic.between_attention", "between_attention", frozenset({"mosaic"}), _refusal, _run
)
