"""Kernels that compute more of a layer than one operation."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from rjax.models import DecoderLayer, Operations, Residual, Rotary
from rjax.models.layers.attention import Attention
from rjax.pallas_kernels.kernel import Kernel, Problem
from rjax.pallas_kernels.layer.one_row.kernel import PartialSumBuffer
from rjax.pallas_kernels.layer.post_attention_block.grid_barrier import GridBarrier
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.worker.kernels import Choice
from rjax.worker.kernels.layer_problem import (
    layer_problem,
    layer_weights,
    post_attention_problem,
    post_attention_weights,
)

type Pools = tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]


class LayerKernels:
    """Runs these kernels on one device, and keeps what they leave for the next layer.

    The object lives for one trace of the step.

    Args:
        choose: chooses the kernel of a problem, through the dispatcher.
        run: runs a kernel on its operands.
        early_weights: see `Problem`.
    """

    def __init__(
        self,
        choose: Callable[[Problem], Choice],
        run: Callable[[Kernel, Problem, tuple[Any, ...]], Any],
        *,
        early_weights: bool,
    ) -> None:
        self._choose, self._run, self._early_weights = choose, run, early_weights
        self._words: PartialSumBuffer | None = None
        self._barrier: GridBarrier | None = None
        self._qkv: dict[int, Partial] = {}  # of the next layer, by its number

    def whole_layer(
        self,
        layer: DecoderLayer,
        residual: Residual,
        rotary: Rotary | None,
        pools: Pools,
        rows: tuple[Any, Any, Any],
        obstacle: str | None,
    ) -> tuple[Residual, Pools] | None:
        """A layer in one kernel: (the stream after it, the pools), or None without such a kernel.

        pools: the layer's K pool and V pool.
        rows: page table, positions and KV slots.
        obstacle: why no kernel may take the layer, or None.
        """
        x, update = residual.x, residual.update
        problem = layer_problem(
            layer,
            rotary,
            pools[0],
            rows=len(x),
            dtype=x.dtype,
            early_weights=self._early_weights,
            obstacle=obstacle,
        )
        if problem.obstacle is None and isinstance(update, Partial) and update.bias is not None:
            problem = dataclasses.replace(problem, obstacle="an update with a bias")
        kernel = self._choose(problem).kernel
        if kernel is None:
            return None
        assert rotary is not None
        operands = (x, update, layer_weights(layer), rotary.cos, rotary.sin, *pools)
        operands += (*rows, self._words)
        x, update, k_pages, v_pages, self._words = self._run(kernel, problem, operands)
        return Residual(x, update), (k_pages, v_pages)

    def post_attention_block(
        self,
        layer: DecoderLayer,
        residual: Residual,
        rotary: Rotary | None,
        following: DecoderLayer | None,
        operations: Operations,
        merged: Callable[[Array | UnmergedAttention], Array],
        obstacle: str | None,
    ) -> Residual | None:
        """Attention, then one kernel up to that of the next layer, or None without such a kernel.

        Args:
            layer, residual, rotary, following: the arguments of `Operations.decoder_layer`.
            operations: runs attention, and the projection before it in the first layer.
            merged: returns the result of attention as one array.
            obstacle: why no kernel may take the layer, or None.
        """
        problem = post_attention_problem(
            layer,
            following,
            rows=len(residual.x),
            dtype=residual.x.dtype,
            early_weights=self._early_weights,
            obstacle=obstacle,
        )
        kernel = self._choose(problem).kernel
        if kernel is None:
            return None
        attention = layer.attention
        assert isinstance(attention, Attention)
        qkv = self._qkv.pop(attention.layer, None)
        if qkv is None:
            residual, qkv = operations.norm_linear(residual, layer.attention_norm, attention.qkv)
        attended = merged(attention.attend(qkv, rotary, operations))
        flat = attended.reshape(len(attended), -1)
        barrier = self._barrier or GridBarrier.empty()
        operands = (residual.x, flat, post_attention_weights(layer, following), barrier)
        x, found, self._barrier = self._run(kernel, problem, operands)
        if following is None:
            return Residual(x, found)
        assert isinstance(following.attention, Attention)
        projection = following.attention.qkv
        summands = found.summands.reshape(*found.summands.shape[:2], *projection.output_shape)
        bias = None if projection.bias is None else projection.bias[...]
        self._qkv[following.attention.layer] = Partial(summands, bias, found.dtype)
        return Residual(x)
