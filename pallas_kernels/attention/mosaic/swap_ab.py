"""Swap-AB decode: attention of one query row, its heads as the columns of wgmma.

wgmma computes at least 64 rows by 8 columns. The G heads of one row that share a KV head are few:
as rows they would be padded to 64, and the softmax with them. So the operands are swapped: S^T =
K Q^T and O^T += V^T P^T. K and V are the operands of 64 rows, heads are columns padded to C, a
multiple of 8, and the accumulator O^T takes H / 16 registers a thread for C = 8. One consumer
warpgroup computes one KV head of a head-pair work tile, in steps of 64 tokens. Its four warps split
the tokens of a step, so that Q, P and the reductions over tokens go through shared memory
(``SwapAbSmem``); the accumulator stays in registers. Numbers are computed and summed in the order
of ``mainloop``, so that both give the same bits. Reads 2 * 64 * H * itemsize bytes of SMEM a step;
writes 2 * H + 4 bytes a head to GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M
from rjax.pallas_kernels.attention.mosaic.cta import ConsumerTile, KVPipeline
from rjax.pallas_kernels.attention.mosaic.epilogue import OutputRow, store_swap_ab
from rjax.pallas_kernels.attention.mosaic.fp8 import Fp8Tiles, scale_of_words, split_numbers
from rjax.pallas_kernels.attention.mosaic.fragments import (
    COLUMNS,
    SWIZZLE_ATOM,
    build_columns,
    extract,
    gather_columns,
    insert,
    pair_type,
    read_words,
    row_pair,
    run_indices,
    store_number,
    sum_eight_rows,
    swizzled_offset,
    write_words,
)
from rjax.pallas_kernels.attention.mosaic.mainloop import clear_unused_rows
from rjax.pallas_kernels.attention.mosaic.softmax import (
    INITIAL_MAX,
    SoftmaxState,
    add_alibi_bias,
    normalize,
    round_to_whole,
    soft_cap_scores,
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


def run_swap_ab_decode(consumer: ConsumerTile) -> None:
    """Compute a single-row work tile: stage its queries, attend, write its result."""
    cta, tile = consumer.cta, consumer.tile
    shape, gmem = cta.shape, cta.gmem
    q_tiles, p_tiles = (view.at[consumer.q_buffer] for view in cta.smem.swap_ab_views(shape))
    smem = SwapAbSmem(
        consumer.q_rows, q_tiles, p_tiles, shape.swap_ab_columns, shape.H, shape.kv_dtype.itemsize
    )
    smem.stage_queries()
    plgpu.commit_smem()
    slopes = None
    fp8 = Fp8Tiles.of(consumer, smem.query_scales()) if shape.has_fp8_kv else None
    if gmem.alibi_slopes is not None:
        first_head = consumer.kv_head * shape.G
        slopes = gather_columns(gmem.alibi_slopes, first_head, shape.swap_ab_columns)
    entry = gmem.destinations[tile.result_slot]  # long before it is needed
    position = gmem.positions[tile.row_start]
    state = SwapAbLoop.of(consumer, smem, position, slopes, fp8).run()
    # All warps have read the query buffer, and what they wrote there is done.
    plgpu.commit_smem()
    plgpu.barrier_arrive(cta.smem.q_empty.at[consumer.q_stage])
    live = jnp.where(tile.head + cta.wg < shape.K, tile.num_rows, 0)
    row = OutputRow(entry, tile.row_start, consumer.kv_head * shape.G, live)
    row_sum = sum_eight_rows(state.row_sum)
    value, lse = normalize(state.acc, state.row_max, row_sum, consumer.v_scale, 1)
    store_swap_ab(gmem.results, value.astype(shape.q_dtype), lse, row, shape.G)


@dataclasses.dataclass(frozen=True, slots=True)
class SwapAbLoop:
    """The loop over a work tile's KV steps. State: acc [H, C], row_max [C], row_sum [64, C].

    Attributes:
        consumer: the work tile.
        smem: its staged queries.
        tokens: int32 [64, C], the token of each score in its tile.
        position: int32, the position of the query row.
        slopes: float32 [C], ALiBi slopes in score units, or None.
        fp8: scales and scratch memory for fp8 pages; None for 16-bit pages.
        unmasked_steps: int32, leading steps in which the row sees all tokens.
    """

    consumer: ConsumerTile
    smem: "SwapAbSmem"
    tokens: Any
    position: Any
    slopes: Any
    fp8: Fp8Tiles | None
    unmasked_steps: Any

    @classmethod
    def of(cls, consumer: ConsumerTile, smem: "SwapAbSmem", position, slopes, fp8) -> "SwapAbLoop":
        """The loop of a query row at ``position``."""
        tile = consumer.tile
        tokens = plgpu.broadcasted_iota(jnp.int32, (KV_TILE, smem.C), 0, layout=_WGMMA)
        unmasked = jnp.int32(0)
        if consumer.cta.cfg.sliding_window is None:
            seen = jnp.maximum(tile.unmasked_stop - tile.kv_start, 0)
            unmasked = lax.div(seen, jnp.int32(KV_TILE))
        return cls(consumer, smem, tokens, position, slopes, fp8, unmasked)

    def run(self) -> SoftmaxState:
        """Run all steps."""
        H, C = self.smem.H, self.smem.C
        state = SoftmaxState(
            plgpu.layout_cast(jnp.zeros((H, C), jnp.float32), _WGMMA),
            plgpu.layout_cast(jnp.full((C,), INITIAL_MAX, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((KV_TILE, C), jnp.float32), _WGMMA),
        )
        return lax.fori_loop(0, self.consumer.tile.num_steps, self._step, state)

    @property
    def _pipeline(self) -> KVPipeline:
        return self.consumer.cta.pipeline

    def _step(self, i, state: SoftmaxState) -> SoftmaxState:
        pipeline, scale = self._pipeline, self.consumer.cta.cfg.scale_log2
        acc, row_max, row_sum = state
        first = self.consumer.tile.kv_start + i * KV_TILE
        k_stage, v_stage = pipeline.stages_of_step(self.consumer.kv_count, i)
        masked = i >= self.unmasked_steps
        pipeline.consumer_wait(k_stage)
        products = self._multiply_keys(k_stage)
        pipeline.consumer_release(k_stage)
        scores = self._scores(products, first, masked)
        new_max = jnp.maximum(row_max, round_to_whole(self.smem.column_max(scores) * scale))
        p = jnp.exp2(scores * scale - _down(new_max, scores.shape))
        p_dtype = jnp.float16 if self.fp8 is not None else pipeline.halves.dtype
        self.smem.store_probabilities(p, p.astype(p_dtype))
        pipeline.consumer_wait(v_stage)
        values = self._values(v_stage, first, masked)
        factor = jnp.exp2(row_max - new_max)
        row_sum = row_sum * _down(factor, row_sum.shape) + self.smem.row_sums()

        def add(ref):
            plgpu.wgmma(ref, values.transpose((1, 0)), self.smem.p_tile.transpose((1, 0)))

        acc = acc * _down(factor, acc.shape)
        acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
        if self.fp8 is None:
            pipeline.consumer_release(v_stage)
        return SoftmaxState(acc, new_max, row_sum)

    def _multiply_keys(self, stage):
        """k @ q, float32 [64, C]."""

        def multiply(acc):
            for queries in self.smem.queries:
                keys = self._pipeline.halves.at[stage, self.consumer.cta.wg]
                plgpu.wgmma(acc, keys, queries.transpose((1, 0)))
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((KV_TILE, self.smem.C), jnp.float32)
        return pl.run_scoped(multiply, acc)

    def _scores(self, products, first, masked):
        """Scores of the tile at token ``first``, with -inf where the row does not see a key."""
        cfg = self.consumer.cta.cfg
        if self.fp8 is not None:
            products = self.fp8.scale_products(products, first, token_axis=0)
        if cfg.soft_cap is not None:
            products = soft_cap_scores(products, cfg.scale, cfg.soft_cap)
        if self.slopes is not None:
            products = add_alibi_bias(
                products, self.slopes, self.tokens, first, self.position, axis=1
            )
        return lax.cond(masked, lambda s: self._masked(s, first), lambda s: s, products)

    def _masked(self, scores, first):
        window = self.consumer.cta.cfg.sliding_window
        # The item has one row, so it sees all tokens before ``unmasked_stop``.
        seen = self.tokens < self.consumer.tile.unmasked_stop - first
        if window is not None:
            seen = seen & (self.tokens > self.position - window - first)
        return jnp.where(seen, scores, -jnp.inf)

    def _values(self, stage, first, masked):
        """The V tile, 16-bit [64, H] SMEM, zero from the item's end on."""
        used = self.consumer.tile.kv_stop - first
        tile = self._pipeline.halves.at[stage, self.consumer.cta.wg]
        if self.fp8 is None:
            clear_unused_rows(tile, used)
            plgpu.commit_smem()
            return tile
        values = self.fp8.convert_values(tile, first, used, masked)
        self._pipeline.consumer_release(stage)
        return values


@dataclasses.dataclass(frozen=True, slots=True)
class SwapAbSmem:
    """Queries, probabilities and reductions of one row's decode, in the warpgroup's query buffer.

    The buffer holds 64 rows; the queries of one row need only a few of them. In bytes from the
    start of the buffer, for C columns:

        raw queries [C, H], 16-bit, later partial sums | queries for wgmma [C, H] | probabilities
        for wgmma [C, 64], 16-bit | column maxima, float32 [4 warps, C] | query scales, float32 [C]

    Attributes:
        raw: 16-bit [64, H] SMEM in rows, as TMA writes queries; the other two view the same bytes.
        q_tiles: [n, C, H] of the pages' dtype, swizzled for wgmma.
        p_tiles: 16-bit [n, C, 64], swizzled for wgmma.
        C, H: static.
        itemsize: bytes of a number of ``q_tiles``. With 1, queries are two tiles: the high and the
            low part, as in ``fp8.split_queries``.
    """

    raw: Any
    q_tiles: Any
    p_tiles: Any
    C: int
    H: int
    itemsize: int

    def __post_init__(self) -> None:
        assert self._scales_at + 4 * self.C <= WGMMA_M * self.H * 2

    @property
    def queries(self) -> tuple[Any, ...]:
        """[C, H] SMEM: operands whose products with the keys add up to the scores."""
        first = 2 // self.itemsize
        return tuple(self.q_tiles.at[first + part] for part in range(first))

    @property
    def p_tile(self):
        """[C, 64] SMEM: the operand of the second product."""
        return self.p_tiles.at[self._p_at // (self.C * KV_TILE * 2)]

    @property
    def _q_bytes(self) -> int:
        """Bytes of the raw queries, and of the queries for wgmma."""
        return self.C * self.H * 2

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

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def convert(_, ref):
            for row0 in range(0, self.C, SWIZZLE_ATOM):
                row = add(div(thread_index(), 16), row0)
                starts = [
                    add(mul(rem(thread_index(), 16), 4), first)
                    for first in range(0, self.H, KV_TILE)
                ]
                numbers = [add(mul(row, self.H), start) for start in starts]
                runs = [read_words(address(ref, mul(n, 2)), 2, SHARED) for n in numbers]
                if split:
                    self._split(ref, row, starts, runs)
                    continue
                for start, words in zip(starts, runs, strict=True):
                    place = swizzled_offset(row, start, self.H, 2)
                    write_words(address(ref, add(place, self._q_bytes)), words, SHARED)

        convert(self.raw)

    def _split(self, ref, row, starts, runs) -> None:
        """Write both fp8 parts of four elements from each start on, and the row's scale."""
        element = ir.MemRefType(ref.type).element_type
        i16 = ir.IntegerType.get_signless(16)
        numbers, scale, inverse = scale_of_words(runs, element)
        for start, pairs in zip(starts, numbers, strict=True):
            parts = split_numbers(pairs, inverse)
            place = add(swizzled_offset(row, start, self.H, 1), self._q_bytes)
            for part, halves in enumerate(parts):
                assert all(half.type == i16 for half in halves)
                word = arith.ori(
                    arith.extui(i32_type(), halves[0]),
                    arith.shli(arith.extui(i32_type(), halves[1]), i32(16)),
                )
                write_words(address(ref, add(place, part * self.C * self.H)), [word], SHARED)
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


def _down(column, shape):
    """A number a column, broadcast over the rows."""
    return lax.broadcast_in_dim(column, shape, [1])
