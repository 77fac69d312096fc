"""Shared memory of swap-AB decode: queries, probabilities and reductions over tokens.

The four warps of a warpgroup split the 64 tokens of a step, so that maxima and sums over tokens go
through shared memory. Everything lies in the warpgroup's query buffer; see ``SwapAbSmem``.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M
from rjax.pallas_kernels.attention.mosaic.fp8 import scale_of_words, split_numbers
from rjax.pallas_kernels.attention.mosaic.fragments import (
    COLUMNS,
    SWIZZLE_ATOM,
    build_columns,
    extract,
    insert,
    pair_type,
    read_words,
    row_pair,
    run_indices,
    store_number,
    swizzled_offset,
    write_words,
)
from rjax.pallas_kernels.mosaic.emit import (
    SHARED,
    add,
    address,
    div,
    i32,
    i32_type,
    mul,
    pointer,
    rem,
    thread_index,
)

_WGMMA = plgpu.Layout.WGMMA
_WARPS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class SwapAbSmem:
    """Queries, probabilities and reductions of one row's decode, in the warpgroup's query buffer.

    The buffer holds 64 rows; the queries of one row need only a few of them. In bytes from the
    start of the buffer, for C columns:

        raw queries [C, W], 16-bit, later partial sums | queries for wgmma [C, W] | probabilities
        for wgmma [C, 64], 16-bit | column maxima, float32 [4 warps, C] | query scales, float32 [C]

    Attributes:
        raw: 16-bit [64, W] SMEM in rows, as TMA writes queries; q_tiles and p_tiles view the same
            bytes.
        other_raws: with 8-bit tiles the raw queries of the other part of a split head, which decide
            about the scale too; else nothing.
        q_tiles: [n, C, W] of the pages' dtype, swizzled for wgmma.
        part_tiles: such views of the buffers of all parts of the head; q_tiles is one of them.
        p_tiles: 16-bit [n, C, 64], swizzled for wgmma.
        C, W: static.
        itemsize: bytes of a number of ``q_tiles``. With 1, queries are two tiles: the high and the
            low part, as in ``fp8.split_queries``.
    """

    raw: Any
    other_raws: tuple[Any, ...]
    q_tiles: Any
    part_tiles: tuple[Any, ...]
    p_tiles: Any
    C: int
    W: int
    itemsize: int

    def __post_init__(self) -> None:
        assert self._scales_at + 4 * self.C <= WGMMA_M * self.W * 2

    @property
    def queries(self) -> tuple[tuple[Any, ...], ...]:
        """For each part of a head, [C, W] SMEM: operands whose products with the keys add up to the
        scores."""
        return tuple(self._operands(tiles) for tiles in self.part_tiles)

    def _operands(self, tiles) -> tuple[Any, ...]:
        first = 2 // self.itemsize
        return tuple(tiles.at[first + term] for term in range(first))

    @property
    def p_tile(self):
        """[C, 64] SMEM: the operand of the second product."""
        return self.p_tiles.at[self._p_at // (self.C * KV_TILE * 2)]

    @property
    def _q_bytes(self) -> int:
        """Bytes of the raw queries, and of the queries for wgmma."""
        return self.C * self.W * 2

    @property
    def _p_at(self) -> int:
        return 2 * self._q_bytes

    @property
    def _max_at(self) -> int:
        return self._p_at + self.C * KV_TILE * 2

    @property
    def _scales_at(self) -> int:
        return self._max_at + _WARPS * self.C * 4

    def stage_queries(self) -> None:
        """Convert the raw queries into operands of wgmma.

        Sixteen threads convert a row. For 8-bit tiles also write the query scales. The caller must
        call ``commit_smem`` next.
        """
        split = self.itemsize == 1

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(self.other_raws)))
        def convert(_, ref, *others):
            for row0 in range(0, self.C, SWIZZLE_ATOM):
                row = add(div(thread_index(), 16), row0)
                starts = [
                    add(mul(rem(thread_index(), 16), 4), first)
                    for first in range(0, self.W, KV_TILE)
                ]
                numbers = [add(mul(row, self.W), start) for start in starts]
                runs = [read_words(address(ref, mul(n, 2)), 2, SHARED) for n in numbers]
                if split:
                    more = [
                        read_words(address(other, mul(n, 2)), 2, SHARED)
                        for other in others
                        for n in numbers
                    ]
                    self._split(ref, row, starts, runs, more)
                    continue
                for start, words in zip(starts, runs, strict=True):
                    place = swizzled_offset(row, start, self.W, 2)
                    write_words(address(ref, add(place, self._q_bytes)), words, SHARED)

        convert(self.raw, *self.other_raws)

    def _split(self, ref, row, starts, runs, more) -> None:
        """Write both fp8 parts of four elements from each start on, and the row's scale.

        more: words of the row that only its scale depends on.
        """
        element = ir.MemRefType(ref.type).element_type
        i16 = ir.IntegerType.get_signless(16)
        numbers, scale, inverse = scale_of_words([*runs, *more], element)
        for start, pairs in zip(starts, numbers[: len(starts)], strict=True):
            parts = split_numbers(pairs, inverse)
            place = add(swizzled_offset(row, start, self.W, 1), self._q_bytes)
            for part, halves in enumerate(parts):
                assert all(half.type == i16 for half in halves)
                word = arith.ori(
                    arith.extui(i32_type(), halves[0]),
                    arith.shli(arith.extui(i32_type(), halves[1]), i32(16)),
                )
                write_words(address(ref, add(place, part * self.C * self.W)), [word], SHARED)
        bits = mgpu.utils.bitcast(scale, i32_type())
        is_first = arith.cmpi(arith.CmpIPredicate.eq, rem(thread_index(), 16), i32(0))
        with mgpu.when(is_first):
            write_words(address(ref, add(mul(row, 4), self._scales_at)), [bits], SHARED)

    def query_scales(self):
        """float32 [C]: the scales of queries in two fp8 parts."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def load(_, ref):
            return build_columns(
                self.C, lambda run: _load_pair(ref, self._scales_at, 0, run, self.C)
            )

        return load(self.raw)

    def column_max(self, scores):
        """float32 [C]: the maximum of each column of [64, C]; a barrier of the warpgroup."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _WGMMA),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def find(_, ref, scores_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            own = []
            for run in range(self.C // 8):
                upper, lower = row_pair(scores_, run)
                best = arith.maximumf(upper, lower)
                for distance in (4, 8, 16):
                    best = arith.maximumf(best, mgpu.utils.shfl_bfly(best, distance))
                own.append(best)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, i32(4))):
                for run, best in enumerate(own):
                    _store_pair(ref, self._max_at, warp, run, self.C, best)
            mgpu.utils.warpgroup_barrier()

            def of_all(run):
                found = [_load_pair(ref, self._max_at, w, run, self.C) for w in range(_WARPS)]
                return arith.maximumf(
                    arith.maximumf(found[0], found[1]), arith.maximumf(found[2], found[3])
                )

            return build_columns(self.C, of_all)

        return find(self.raw, scores)

    def store_probabilities(self, p, rounded) -> None:
        """Write probabilities [64, C], ``rounded`` to 16 bits, and sums of the float32 ones.

        The caller must call ``commit_smem`` next; then ``p_tile`` and ``row_sums`` are valid.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _WGMMA))
        def store(_, ref, p_, rounded_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            token = add(mul(warp, 16), div(lane, 4))
            for run in range(self.C // 8):
                upper, lower = row_pair(p_, run)
                place = add(mul(warp, 8), div(lane, 4))
                _store_pair(ref, 0, place, run, self.C, arith.addf(upper, lower))
                for which, pair in enumerate(row_pair(rounded_, run)):
                    for n in range(2):
                        column = add(mul(rem(lane, 4), 2), n)
                        at = swizzled_offset(column, add(token, 8 * which), KV_TILE, 2)
                        at = add(at, self._p_at + run * SWIZZLE_ATOM * KV_TILE * 2)
                        store_number(pointer(address(ref, at), SHARED), extract(pair, n))

        store(self.raw, p, rounded)

    def row_sums(self):
        """float32 [64, C]: sums of the probabilities over rows 8 apart, which all hold the sum.

        The order of the sums is that of ``softmax``, so that both paths give the same bits.
        """

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((WGMMA_M, self.C), jnp.float32, layout=_WGMMA),
        )
        def gather(_, ref):
            lane = rem(thread_index(), 32)
            zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
            result = mgpu.FragmentedArray.splat(zero, (WGMMA_M, self.C), _WGMMA.to_mgpu())
            for run in range(self.C // 8):
                found = [
                    _load_pair(ref, 0, add(div(lane, 4), 8 * w), run, self.C) for w in range(_WARPS)
                ]
                total = arith.addf(arith.addf(found[0], found[1]), arith.addf(found[2], found[3]))
                for at in run_indices(result, run):
                    result.registers[at] = total
            return result

        return gather(self.raw)


def _store_pair(ref, base: int, row, run: int, C: int, pair) -> None:
    words = [mgpu.utils.bitcast(extract(pair, n), i32_type()) for n in range(2)]
    write_words(address(ref, _pair_offset(base, row, run, C)), words, SHARED)


def _load_pair(ref, base: int, row, run: int, C: int):
    words = read_words(address(ref, _pair_offset(base, row, run, C)), 2, SHARED)
    pair = llvm.mlir_undef(pair_type(ir.F32Type.get()))
    for n, word in enumerate(words):
        pair = insert(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
    return pair


def _pair_offset(base: int, row, run: int, C: int):
    """Byte offset of this thread's two columns in a row of float32 [..., C] at byte ``base``."""
    row = row if isinstance(row, ir.Value) else i32(row)
    column = add(mul(rem(thread_index(), 4), 2), 8 * run)
    return add(mul(arith.addi(mul(row, C), column), 4), base)
