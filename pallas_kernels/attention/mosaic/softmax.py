"""Online softmax of one warpgroup's 64 matrix rows over KV tiles, in registers.

FlashAttention's recurrence: for each KV tile the row maximum grows, the accumulator and the row sum
are rescaled to it, and the probabilities exp2(score - row_max) go to the second product. Scores
count in exponents of two. ``row_max`` is rounded to a whole number: rescaling is then by powers of
two and exact, so that a row's result does not depend on how many tiles are processed at once.
The layout is wgmma's accumulator layout: the four threads of a quad share a row and hold two
neighbouring columns of every run of eight. Nothing here touches memory.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M, KernelConfig
from rjax.pallas_kernels.attention.mosaic.fp8 import Fp8Tiles
from rjax.pallas_kernels.mosaic.emit import SCALAR

_PARTIAL_SUMS = 8  # of a row, two a thread: threads add theirs up only at the end of a work tile
INITIAL_MAX = -1e30
"""Row maximum before the first visible key: finite, so that empty rows stay free of NaN."""
_ROUNDING = 1.5 * 2.0**23  # float32 numbers near it are whole
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)
_add_registers = np.vectorize(arith.addf, otypes=[object])


class SoftmaxState(NamedTuple):
    """Running state, float32 registers.

    acc: [64, H], the sum of probabilities times values, relative to ``row_max``. row_max: [64],
    highest score so far as an exponent of two, whole. row_sum: [64, 8], partial sums of the
    probabilities. Swap-AB decode has the transposed shapes, see ``swap_ab``.
    """

    acc: Any
    row_max: Any
    row_sum: Any


class TileProbabilities(NamedTuple):
    """Probabilities of some KV tiles, a tuple entry a tile.

    p: 16-bit [64, 64]; sums: float32 [64, 8], of the probabilities before rounding; row_max:
    float32 [64], the maximum up to the tile, which its probabilities are relative to.
    """

    p: tuple[Any, ...]
    sums: tuple[Any, ...]
    row_max: tuple[Any, ...]


def initial_state(H: int) -> SoftmaxState:
    """The state of rows that have seen nothing."""
    return SoftmaxState(
        plgpu.layout_cast(jnp.zeros((WGMMA_M, H), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((WGMMA_M,), INITIAL_MAX, jnp.float32), _ROW),
        plgpu.layout_cast(jnp.zeros((WGMMA_M, _PARTIAL_SUMS), jnp.float32), _WGMMA),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax:
    """The softmax step of one warpgroup in one work tile; all arrays in registers.

    Attributes:
        cfg: scale, soft cap, window.
        columns: int32 [64, 64], the column of each score.
        visible_stop: int32 [64], the first token that each row does not see.
        positions: int32 [64], the positions of the queries.
        slopes: float32 [64] in score units, or None.
        fp8: scales of fp8 tiles, or None.
        p_dtype: dtype of the probabilities, 16 bits.
    """

    cfg: KernelConfig
    columns: Any
    visible_stop: Any
    positions: Any
    slopes: Any
    fp8: Fp8Tiles | None
    p_dtype: Any

    @classmethod
    def of(cls, cfg: KernelConfig, kv_stop, positions, slopes, fp8, kv_dtype) -> "Softmax":
        """The step for rows at ``positions`` of an item that ends at ``kv_stop`` (int32 scalar)."""
        return cls(
            cfg,
            plgpu.broadcasted_iota(jnp.int32, (WGMMA_M, KV_TILE), 1, layout=_WGMMA),
            jnp.minimum(positions + 1, kv_stop),
            positions,
            slopes,
            fp8,
            kv_dtype if fp8 is None else fp8.v_f16.dtype,
        )

    def probabilities(
        self, products: Sequence[Any], first_tokens: Sequence[Any], row_max, masked
    ) -> TileProbabilities:
        """Probabilities of tiles that start at ``first_tokens``.

        Args:
            products: float32 [64, 64], q @ k of each tile.
            first_tokens: int32 scalars.
            row_max: float32 [64], the row maximum before these tiles.
            masked: bool scalar, whether some row does not see all of the tiles.
        """
        scores = self._scores(products, first_tokens)

        def mask(*scores):
            return tuple(map(self._masked, scores, first_tokens))

        scores = lax.cond(masked, mask, lambda *scores: scores, *scores)
        scale = self.cfg.scale_log2
        maxima = []
        for s in scores:
            tile_max = round_to_whole(s.max(axis=1) * scale)
            maxima.append(jnp.maximum(maxima[-1] if maxima else row_max, tile_max))
        p, sums = [], []
        for s, maximum in zip(scores, maxima, strict=True):
            exact = jnp.exp2(s * scale - _across(maximum, s.shape))
            sums.append(_partial_row_sums(exact))
            p.append(exact.astype(self.p_dtype))
        # Without the barrier the sums are computed later, when their inputs no longer fit in
        # registers.
        p, sums = lax.optimization_barrier((tuple(p), tuple(sums)))
        return TileProbabilities(p, sums, tuple(maxima))

    def _scores(self, products: Sequence[Any], first_tokens: Sequence[Any]) -> tuple[Any, ...]:
        """Unmasked scores: with fp8 scales, soft cap and ALiBi bias."""
        cfg, scores = self.cfg, tuple(products)
        if self.fp8 is not None:
            scale = functools.partial(self.fp8.scale_products, token_axis=1)
            scores = tuple(map(scale, scores, first_tokens))
        if cfg.soft_cap is not None:
            scores = tuple(soft_cap_scores(s, cfg.scale, cfg.soft_cap) for s in scores)
        if self.slopes is not None:
            scores = tuple(
                add_alibi_bias(s, self.slopes, self.columns, first, self.positions, axis=0)
                for s, first in zip(scores, first_tokens, strict=True)
            )
        return scores

    def _masked(self, scores, first):
        """-inf where the key at ``first + column`` is not visible to the row."""
        seen = self.columns < _across(self.visible_stop - first, scores.shape)
        window = self.cfg.sliding_window
        if window is not None:
            seen = seen & (self.columns > _across(self.positions - window - first, scores.shape))
        return jnp.where(seen, scores, -jnp.inf)


def rescale(state: SoftmaxState, tiles: TileProbabilities) -> tuple[SoftmaxState, tuple[Any, ...]]:
    """(the state with the tiles' sums, their probabilities), all relative to the last row maximum.

    Only ``acc`` does not contain the tiles yet: the second product adds them.
    """
    acc, row_max, row_sum = state

    def keep(acc, total, *p):
        for sums in tiles.sums:
            total = total + sums
        return acc, total, *p

    def scale(acc, total, *p):
        last = tiles.row_max[-1]
        before = (row_max, *tiles.row_max[:-1])
        for old, new, sums in zip(before, tiles.row_max, tiles.sums, strict=True):
            total = total * _across(jnp.exp2(old - new), total.shape) + sums
        rescaled = (
            x if maximum is last else x * _across(jnp.exp2(maximum - last).astype(x.dtype), x.shape)
            for x, maximum in zip(p, tiles.row_max, strict=True)
        )
        return acc * _across(jnp.exp2(row_max - last), acc.shape), total, *rescaled

    # After the first tiles a row maximum seldom grows by a whole power of two.
    changed = _any_differ(row_max, tiles.row_max[-1])
    acc, row_sum, *p = lax.cond(changed, scale, keep, acc, row_sum, *tiles.p)
    return SoftmaxState(acc, tiles.row_max[-1], row_sum), tuple(p)


def normalize(acc, row_max, row_sum, v_scale, axis: int):
    """(output, LSE) of a finished state, float32.

    row_max, row_sum: one number a row, along ``axis`` of acc. v_scale: float32 scalar that the
    values are multiplied with, or None. Rows that saw nothing give 0 and -inf.
    """
    empty = row_sum == 0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, row_sum))
    if v_scale is not None:
        inverse = inverse * v_scale
    value = acc * lax.broadcast_in_dim(inverse, acc.shape, [axis])
    lse = jnp.log(jnp.where(empty, 1.0, row_sum)) + row_max * math.log(2.0)
    return value, jnp.where(empty, -jnp.inf, lse)


def round_to_whole(x):
    """The nearest whole number; beyond 2**22, one near it."""
    return (x + _ROUNDING) - _ROUNDING


def soft_cap_scores(products, scale: float, soft_cap: float):
    """``tanh(products * scale / soft_cap)``.

    Accurate to about 1e-6. The GPU's own tanh is accurate to 2**-11, too little for a cap of 50.
    """
    x = products * (scale / soft_cap)
    root = lax.rsqrt(jnp.exp2(x * (2 * math.log2(math.e))) + 1)
    return 1 - 2 * root * root


def add_alibi_bias(scores, slopes, tokens, first, positions, axis: int):
    """scores + slope * (key position - query position), for keys at ``first + tokens``.

    slopes: float32, in score units, along ``axis`` of the scores; tokens: int32, of the scores'
    shape; positions: int32, positions of the queries, in the slopes' shape or a scalar.
    Method: Press et al., 2022.
    """

    def broadcast(x):
        return lax.broadcast_in_dim(x, scores.shape, [axis])

    at_first = slopes * (first - positions).astype(jnp.float32)
    return scores + (broadcast(at_first) + broadcast(slopes) * tokens.astype(jnp.float32))


def _across(row, shape):
    """A number a row, broadcast over the columns."""
    return lax.broadcast_in_dim(row, shape, [0])


def _partial_row_sums(p):
    """[64, 8] out of [64, 64]: sums over columns 8 apart, which one thread holds."""

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M, _PARTIAL_SUMS), jnp.float32, layout=_WGMMA),
    )
    def fold(_, p_):
        layout = _WGMMA.to_mgpu()
        wanted = layout.registers_shape((WGMMA_M, _PARTIAL_SUMS))
        [axis] = [n for n, size in enumerate(p_.registers.shape) if size != wanted[n]]
        runs = list(np.moveaxis(p_.registers, axis, 0))
        while len(runs) > 1:
            runs = [_add_registers(a, b) for a, b in zip(runs[::2], runs[1::2], strict=True)]
        registers = np.expand_dims(runs[0], axis)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return fold(p)


def _any_differ(a, b):
    """Whether two [64] arrays differ in a row that this warp holds: a warp vote."""

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
