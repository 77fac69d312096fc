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
from rjax.worker.kernels.problem import Problem


def between_problem(
    layer: DecoderLayer,
    following: DecoderLayer | None,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
) -> Problem | None:
    """What a kernel is chosen by; None for layers between whose attentions no kernel computes all.

    Such kernels know RMS norms before attention and feed-forward, silu with a gate, unquantised
    weights, and a bias of queries, keys and values only.
    """
    layers = [layer] if following is None else [layer, following]
    if not all(map(_is_plain, layers)):
        return None
    attention, mlp = _parts(layer)
    norms, columns = [layer.mlp_norm], [attention.output.depth, mlp.down.depth]
    if following is not None:
        qkv = _parts(following)[0].qkv
        norms.append(following.attention_norm)
        columns.append(math.prod(qkv.output_shape))
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


def _is_plain(layer: DecoderLayer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        return False
    projections = (attention.qkv, attention.output, mlp.up, mlp.down)
    norms = (layer.attention_norm, layer.mlp_norm)
    return (
        not layer.parallel
        and layer.scale == 1
        and layer.attention_post_norm is None
        and layer.mlp_post_norm is None
        and all(norm is not None and norm.is_rms for norm in norms)
        and all(projection.scheme == UNQUANTISED for projection in projections)
        and all(projection.bias is None for projection in projections[1:])
        and mlp.activation.is_swiglu
    )


def _parts(layer: DecoderLayer) -> tuple[Attention, Mlp]:
    assert isinstance(layer.attention, Attention) and isinstance(layer.mlp, Mlp)
    return layer.attention, layer.mlp


def between_weights(layer: DecoderLayer, following: DecoderLayer | None) -> BetweenWeights:
    """The arrays of layers that have a `between_problem`."""
    attention, mlp = _parts(layer)
    assert layer.mlp_norm is not None
    next_norm = next_qkv = None
    if following is not None:
        assert following.attention_norm is not None
        next_norm = following.attention_norm.weight[...]
        next_qkv = _matrix(_parts(following)[0].qkv)
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
        *(x, attended, weights, arrivals, problem.eps), early_weights=problem.early_weights
    )


BETWEEN_ATTENTION = Kernel(
    "mosaic.between_attention", "between_attention", frozenset({"mosaic"}), _refusal, _run
)
