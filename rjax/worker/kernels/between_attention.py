"""The kernel from one attention to the next: the problem it is chosen by, and its operands."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import DecoderLayer, Linear
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.between_attention import mosaic
from rjax.pallas_kernels.between_attention.grid_barrier import GridBarrier
from rjax.pallas_kernels.between_attention.mosaic import BetweenWeights
from rjax.pallas_kernels.kernel import HOPPER, Kernel, Problem
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.layer_problem import plain_parts, unlike_llama


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BetweenProblem(Problem):
    """What is between one attention and the next; with an obstacle, nothing else is known of it.

    between_attention: (x, attended [T, E], `BetweenWeights`, `GridBarrier`) to (the stream, the
    update of the feed-forward or qkv of the next layer as a Partial, counters for the next layer).

    Attributes:
        depth: D.
        columns: E, F and the columns of qkv of the next layer, if one follows.
        early_weights: see `LinearProblem`.
        eps: epsilon of the norms.
    """

    depth: int = 0
    columns: tuple[int, ...] = ()
    early_weights: bool = False
    eps: float = 0.0


def between_problem(
    layer: DecoderLayer,
    following: DecoderLayer | None,
    *,
    rows: int,
    dtype: DTypeLike,
    early_weights: bool = False,
    obstacle: str | None = None,
) -> BetweenProblem:
    """The problem by which a kernel is chosen.

    Such kernels know layers that `unlike_llama` accepts, with unquantised weights. Anything else is
    the problem's obstacle, after the one that is given.
    """
    layers = [layer] if following is None else [layer, following]
    obstacle = obstacle or next(filter(None, map(_obstacle, layers)), None)
    norms = [layer.mlp_norm, *(each.attention_norm for each in layers[1:])]
    eps = {norm.eps for norm in norms if norm is not None}
    if obstacle is None and len(eps) != 1:
        obstacle = "norms of different epsilons"
    if obstacle is not None:
        name = jnp.dtype(dtype).name
        return BetweenProblem(
            operation="between_attention", rows=rows, dtype=name, obstacle=obstacle
        )
    attention, mlp = plain_parts(layer)
    columns = [attention.output.depth, mlp.down.depth]
    if following is not None:
        columns.append(math.prod(plain_parts(following)[0].qkv.output_shape))
    return BetweenProblem(
        operation="between_attention",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        depth=mlp.up.depth,
        columns=tuple(columns),
        early_weights=early_weights,
        eps=eps.pop(),
    )


def _obstacle(layer: DecoderLayer) -> str | None:
    why = unlike_llama(layer)
    if why is not None:
        return why
    scheme = plain_parts(layer)[0].qkv.scheme
    return None if scheme == UNQUANTISED else f"weights stored as {scheme.name}"


def between_weights(layer: DecoderLayer, following: DecoderLayer | None) -> BetweenWeights:
    """The arrays of layers that have a `between_problem` without an obstacle."""
    assert layer.mlp_norm is not None
    attention, mlp = plain_parts(layer)
    next_norm = next_qkv = None
    if following is not None:
        assert following.attention_norm is not None
        next_norm = following.attention_norm.weight[...]
        next_qkv = _matrix(plain_parts(following)[0].qkv)
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


def _refusal(problem: BetweenProblem) -> str | None:
    E, F, *following = problem.columns
    Q = following[0] if following else None
    return mosaic.refusal(problem.rows, problem.depth, E, F, Q, problem.dtype)


def _run(
    problem: BetweenProblem,
    x: Array,
    attended: Array,
    weights: BetweenWeights,
    barrier: GridBarrier,
) -> tuple[Array, Partial, GridBarrier]:
    return mosaic.between_attention(
        x, attended, weights, barrier, problem.eps, early_weights=problem.early_weights
    )


BETWEEN_ATTENTION = Kernel(
    "mosaic.between_attention",
    "between_attention",
    "mosaic",
    _refusal,
    _run,
    compute_capabilities=HOPPER,
)
