"""Online softmax of one unit's rows over its tiles, and the writing of its result."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic.alibi import add_distance
from pallas_kernels.attention.mosaic.config import ROWS, KernelConfig
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.stores import store_row_scalars, store_rows
from pallas_kernels.mosaic_emit import SCALAR

_SUMS = 8  # partial sums of a row's weights, two a thread: threads meet only at a unit's end
LOWEST = -1e30
"""The peak of rows that have seen nothing yet: finite, so that they stay free of NaN."""
_ROUNDING = 1.5 * 2.0**23  # float32 numbers near it are whole
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_add_registers = np.vectorize(arith.addf, otypes=[object])


def begin(H: int):
    """(acc [64, H], top [64], total [64, 8]) of rows that have seen nothing, float32.

    ``acc`` is the sum of weighted values, ``top`` the highest score in units of log2, whole; the
    sum over the last axis of ``total`` is a row's sum of weights.
    """
    return (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), _ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, _SUMS), jnp.float32), _WGMMA),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """How one warpgroup weighs the scores of its 64 rows.

    columns: int32 [64, 64], a column's number. limit: int32 [64], the first token that each row
    does not see; reach: its position. slopes: float32 [64] in the kernel's units, or None. narrow:
    for tiles of 8 bits. dtype: of weights, 16 bits.
    """

    cfg: KernelConfig
    columns: Any
    limit: Any
    reach: Any
    slopes: Any
    narrow: ByteTiles | None
    dtype: Any

    def weigh(self, scores: Sequence[Any], firsts: Sequence[Any], top, masked):
        """Of each tile: weights in 16 bits, their sums [64, 8], and the rows' peaks until then.

        scores: float32 [64, 64] of tiles at tokens ``firsts``. top: the rows' peaks before. masked:
        bool scalar, whether some row does not see all of the tiles.
        """
        cfg, columns, reach = self.cfg, self.columns, self.reach
        if self.narrow is not None:
            narrow = self.narrow
            scores = tuple(
                narrow.scaled(s, at, tokens=1) for s, at in zip(scores, firsts, strict=True)
            )
        if cfg.soft_cap is not None:
            scores = tuple(capped(s, cfg.scale, cfg.soft_cap) for s in scores)
        if self.slopes is not None:
            scores = tuple(
                add_distance(s, self.slopes, columns, first, reach, axis=0)
                for s, first in zip(scores, firsts, strict=True)
            )

        def mask(*scores):
            return tuple(
                _mask(s, columns, first, self.limit, reach, cfg.sliding_window)
                for s, first in zip(scores, firsts, strict=True)
            )

        scores = lax.cond(masked, mask, lambda *scores: scores, *scores)
        factor = cfg.log2_factor
        # Whole numbers, so that fading is by powers of two and rounds nothing: a row's result does
        # not depend on how many tiles are weighed at once.
        peaks = []
        for s in scores:
            peaks.append(jnp.maximum(peaks[-1] if peaks else top, whole(s.max(axis=1) * factor)))
        weights, sums = [], []
        for s, peak in zip(scores, peaks, strict=True):
            w = jnp.exp2(s * factor - _wide(peak, s.shape))
            sums.append(_folded(w))
            weights.append(w.astype(self.dtype))
        # Together, or sums are put off, for which there is no room in registers.
        return (*lax.optimization_barrier((tuple(weights), tuple(sums))), tuple(peaks))


def fade(acc, total, top, weights, sums, peaks):
    """(acc, total with ``sums``, weights), all counted from the last of ``peaks``.

    acc, total: counted from ``top``; weights, sums: of some tiles, each counted from its own peak.
    """

    def kept(acc, total, *weights):
        for some in sums:
            total = total + some
        return acc, total, *weights

    def faded(acc, total, *weights):
        last = peaks[-1]
        for old, new, some in zip((top, *peaks[:-1]), peaks, sums, strict=True):
            total = total * _wide(jnp.exp2(old - new), total.shape) + some
        counted = (
            w if peak is last else w * _wide(jnp.exp2(peak - last).astype(w.dtype), w.shape)
            for w, peak in zip(weights, peaks, strict=True)
        )
        return acc * _wide(jnp.exp2(top - last), acc.shape), total, *counted

    # After the first steps a peak seldom grows by a whole power of two.
    changed = _any_differ(top, peaks[-1])
    acc, total, *weights = lax.cond(changed, faded, kept, acc, total, *weights)
    return acc, total, tuple(weights)


def finish(state, targets, entry, row, head, live, G: int, unit=None):
    """Normalise and write the live rows; targets: (out, lse, part, part_lse) in GMEM.

    entry: int32 [64], merge entries or -1. row, head: of matrix row 0. unit: of the values, a
    float32 scalar, None for 1.
    """
    out, lse, part, part_lse = targets
    acc, top, sums = state
    value, log_sum = normalised(acc, top, sums.sum(axis=1), unit, 0)
    value = value.astype(out.dtype)
    store_rows(out, part, value, entry, row, head, live, G)
    store_row_scalars(lse, part_lse, log_sum, entry, row, head, live, G)


def normalised(acc, top, total, unit, axis: int):
    """(sums of weighted values over those of weights, times ``unit`` if there is one; LSE).

    top, total: float32, along ``axis`` of acc.
    """
    empty = total == 0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    if unit is not None:
        inverse = inverse * unit
    value = acc * lax.broadcast_in_dim(inverse, acc.shape, [axis])
    log_sum = jnp.log(jnp.where(empty, 1.0, total)) + top * math.log(2.0)
    return value, jnp.where(empty, -jnp.inf, log_sum)


def _wide(row, shape):
    """A number a row, for every column."""
    return lax.broadcast_in_dim(row, shape, [0])


def _folded(weights):
    """[64, 8] out of [64, 64]: sums over columns 8 apart, which one thread holds."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((ROWS, _SUMS), jnp.float32, layout=_WGMMA),
    )
    def fold(_, weights_):
        layout = _WGMMA.to_mgpu()
        wanted = layout.registers_shape((ROWS, _SUMS))
        [axis] = [n for n, size in enumerate(weights_.registers.shape) if size != wanted[n]]
        runs = list(np.moveaxis(weights_.registers, axis, 0))
        while len(runs) > 1:
            runs = [_add_registers(a, b) for a, b in zip(runs[::2], runs[1::2], strict=True)]
        registers = np.expand_dims(runs[0], axis)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return fold(weights)


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


def whole(x):
    """The nearest whole number; beyond 2**22, one near it."""
    return (x + _ROUNDING) - _ROUNDING


def capped(products, scale: float, soft_cap: float):
    """``tanh`` of scaled products over the soft cap.

    Right to about 1e-6, where the GPU's own is to 2**-11: too little for a cap of 50.
    """
    x = products * (scale / soft_cap)
    root = lax.rsqrt(jnp.exp2(x * (2 * math.log2(math.e))) + 1)
    return 1 - 2 * root * root


def _mask(scores, columns, first, limit, reach, window):
    """-inf where the key at ``first + column`` is not below the row's limit, or left its window."""
    seen = columns < _wide(limit - first, scores.shape)
    if window is not None:
        seen = seen & (columns > _wide(reach - window - first, scores.shape))
    return jnp.where(seen, scores, -jnp.inf)
