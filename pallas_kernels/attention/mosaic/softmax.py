"""Online softmax of one unit's rows, and the writing of their results."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic.alibi import add_distance
from pallas_kernels.attention.mosaic.config import ROWS, TILE, KernelConfig
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.stores import store_row_scalars, store_rows
from pallas_kernels.mosaic_emit import SCALAR

_LOWEST = -1e30  # finite, so that rows that have seen nothing yet stay free of NaN
_ROUNDING = 1.5 * 2.0**23  # float32 numbers near it are whole
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """The online softmax of one unit's rows, from scores of [64, 64] tiles to weights.

    Attributes:
        cfg: of the kernel.
        dtype: of the weights that the tensor cores take, 16 bits.
        stop: end of the unit's KV tokens.
        reach: int32 [64], each row's position.
        slopes: float32 [64] in the kernel's units, or None.
        narrow: for tiles of 8 bits, or None.
    """

    cfg: KernelConfig
    dtype: Any
    stop: Any
    reach: Any
    slopes: Any
    narrow: ByteTiles | None

    def initial(self, head_dim: int):
        """(acc [64, H], top [64], total [64]) of rows that have seen nothing; top in units of
        log2."""
        return (
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), _WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
        )

    def weigh(self, products, firsts, top, total, masked: bool):
        """(weights, peaks, total): float32, each tile's weights counted from its own peak.

        products: a tile's queries by its keys, float32; firsts: its first token. The last peak is
        the rows' highest, from which ``total`` counts. masked: some rows do not see all the tokens.
        """
        factor = self.cfg.log2_factor
        scores = [self._score(*tile, masked) for tile in zip(products, firsts, strict=True)]
        # Whole numbers, so that fading is by powers of two and rounds nothing: a row's result does
        # not depend on how many tiles are weighed at once.
        peaks = [top]
        for s in scores:
            peaks.append(jnp.maximum(peaks[-1], _whole(s.max(axis=1) * factor)))
        peaks = peaks[1:]
        total = total * jnp.exp2(top - peaks[-1])
        weights = []
        for s, own in zip(scores, peaks, strict=True):
            weight = jnp.exp2(s * factor - lax.broadcast_in_dim(own, s.shape, [0]))
            weights.append(weight)
            total = total + weight.sum(axis=1) * _fade(own, peaks[-1])
        return tuple(weights), tuple(peaks), total

    def fade(self, acc, weights, top, peaks):
        """(acc, weights), from now on counted from the last peak, the weights in 16 bits; acc was
        counted from ``top``."""

        def faded(acc, *weights):
            counted = [
                w if own is peaks[-1] else _times(w, _fade(own, peaks[-1]))
                for w, own in zip(weights, peaks, strict=True)
            ]
            return _times(acc, jnp.exp2(top - peaks[-1])), *counted

        # After the first steps a peak seldom grows by a whole power of two.
        changed = _any_differ(top, peaks[-1])
        acc, *weights = lax.cond(changed, faded, lambda *same: same, acc, *weights)
        return acc, tuple(w.astype(self.dtype) for w in weights)

    def _score(self, products, first, masked: bool):
        cfg, scores = self.cfg, products
        columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=_WGMMA)
        if self.narrow is not None:
            scores = self.narrow.scaled(scores, first)
        if cfg.soft_cap is not None:
            scores = _tanh(scores * (cfg.scale / cfg.soft_cap))
        if self.slopes is not None:
            scores = add_distance(scores, self.slopes, columns, first, self.reach)
        if masked:
            limit = jnp.minimum(self.reach + 1, self.stop)
            scores = _mask(scores, columns, first, limit, self.reach, cfg.sliding_window)
        return scores


def _fade(own, peak):
    """What counts a number from ``peak`` that is counted from ``own``."""
    return 1.0 if own is peak else jnp.exp2(own - peak)


def _times(tile, rows):
    """Each row of a tile by its number of ``rows``."""
    return tile * lax.broadcast_in_dim(rows, tile.shape, [0])


def _any_differ(a, b):
    """Whether two [64] arrays differ in a row that this warp holds."""

    @plgpu.inline_mgpu(
        arg_types=(_ROW, _ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    )
    def vote(_, a_, b_):
        i32, first = ir.IntegerType.get_signless(32), ir.DenseI64ArrayAttr.get([0])

        def number(register):
            return vector.extract(register, [], first)

        unequal = [
            arith.extui(i32, arith.cmpf(arith.CmpFPredicate.UNE, number(x), number(y)))
            for x, y in zip(a_.registers.flat, b_.registers.flat, strict=True)
        ]
        mine = functools.reduce(arith.ori, unequal)
        found = llvm.inline_asm(
            i32,
            [mine],
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.s32 $0, 1, 0, p; }",
            "=r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), SCALAR.to_mgpu(), is_signed=True)

    return vote(a, b) != 0


def _whole(x):
    """The nearest whole number; beyond 2**22, one near it."""
    return (x + _ROUNDING) - _ROUNDING


def _tanh(x):
    """Right to about 1e-6, where the GPU's own is to 2**-11: too little for a cap of 50."""
    root = lax.rsqrt(jnp.exp2(x * (2 * math.log2(math.e))) + 1)
    return 1 - 2 * root * root


def _mask(scores, columns, first, limit, reach, window):
    """-inf where the key at ``first + column`` is not below the row's limit, or left its window."""
    wide = lambda x: lax.broadcast_in_dim(x, scores.shape, [0])  # noqa: E731
    seen = columns < wide(limit - first)
    if window is not None:
        seen = seen & (columns > wide(reach - window - first))
    return jnp.where(seen, scores, -jnp.inf)


def finish(state, targets, entry, row, head, live, G: int, unit=None):
    """Normalise and write the live rows; targets: (out, lse, part, part_lse) in GMEM.

    entry: int32 [64], merge entries or -1. row, head: of matrix row 0. unit: of the values, a
    float32 scalar, None for 1.
    """
    out, lse, part, part_lse = targets
    acc, top, total = state
    empty = total == 0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    if unit is not None:
        inverse = inverse * unit
    value = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(out.dtype)
    log_sum = jnp.log(jnp.where(empty, 1.0, total)) + top * math.log(2.0)
    log_sum = jnp.where(empty, -jnp.inf, log_sum)
    store_rows(out, part, value, entry, row, head, live, G)
    store_row_scalars(lse, part_lse, log_sum, entry, row, head, live, G)
