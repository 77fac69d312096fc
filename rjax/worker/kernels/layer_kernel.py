"""The kernel of a whole decoder layer, for steps of one row."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.one_row_layer.mosaic import (
    PartialSumBuffer,
    decoder_layer,
    layer_sizes,
    refusal,
)
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.layer_problem import LayerProblem


def _refusal(problem: LayerProblem) -> str | None:
    return refusal(
        rows=problem.rows,
        D=problem.depth,
        N=problem.num_heads,
        K=problem.num_kv_heads,
        H=problem.head_dim,
        F=problem.width,
        page_size=problem.page_size,
        rotary_dim=problem.rotary_dim,
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        values=problem.values,
        group=problem.group,
        zero_points=problem.zero_points,
    )


def _run(problem: LayerProblem, x: Array, update: Any, *rest: Any) -> Any:
    *arrays, words = rest
    sizes = layer_sizes(
        D=problem.depth,
        N=problem.num_heads,
        K=problem.num_kv_heads,
        H=problem.head_dim,
        F=problem.width,
        values=problem.values,
    )
    if update is None:  # of the first layer; as many summands as in the others, for one kernel
        update = Partial(jnp.zeros((sizes.down.splits, *x.shape), jnp.float32), dtype=x.dtype)
    if words is None or words.current.shape != (sizes.words,):  # the layer before has other bits
        words = PartialSumBuffer.empty(sizes)
    operands: tuple[Any, ...] = (x, update, *arrays, words)
    return decoder_layer(
        *operands,
        scale=problem.score_scale,
        eps=problem.eps,
        head_eps=problem.head_eps,
        early_weights=problem.early_weights,
    )


ONE_ROW_LAYER = Kernel(
    "mosaic.one_row_layer",
    "decoder_layer",
    "mosaic",
    _refusal,
    _run,
    compute_capabilities=HOPPER,
)
