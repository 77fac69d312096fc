"""What a CTA does for a layer: its units, the copies of its producer, the work of its consumers.

Producer and consumers go over the same units in the same order and count the same stages of the
ring, so they meet only at its barriers.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from rjax.pallas_kernels.layer.one_row import attention as heads_of
from rjax.pallas_kernels.layer.one_row import few_bit_gemv, gemv
from rjax.pallas_kernels.layer.one_row.few_bit_gemv import FewBits
from rjax.pallas_kernels.layer.one_row.rows import activated_row, merged_row, normed_row
from rjax.pallas_kernels.layer.one_row.sizes import TILE, LayerSizes, Product
from rjax.pallas_kernels.layer.one_row.smem_row import Row
from rjax.pallas_kernels.layer.one_row.stage_scales import arrive_after_copies
from rjax.pallas_kernels.layer.one_row.tables import TablePlaces, tables
from rjax.pallas_kernels.layer.one_row.threads import CONSUMERS, await_prefetch, prefetch, simt
from rjax.pallas_kernels.mosaic.emit import add, address, i32, mul
from rjax.pallas_kernels.mosaic.pipeline import Pipeline
from rjax.pallas_kernels.mosaic.tma_copy import evict_first
from rjax.pallas_kernels.mosaic.words import EMPTY, store_words


@dataclasses.dataclass(frozen=True, slots=True)
class Ring(Pipeline):
    """A pipeline whose stages have two blocks.

    At most ``under_way`` stages are being copied: more would not arrive sooner, and words would
    wait behind them.

    Attributes:
        blocks: bfloat16 [stages, 2, 64, 64] SMEM.
        weights: the same memory, for weights: [stages, 2, 64, 128 bytes].
        under_way: most stages that are copied at the same time.
        words: float32 SMEM, each stage's words of `StageScales`; None without.
    """

    blocks: Any
    weights: Any
    under_way: int
    words: Any = None

    def copy(self, number, copies, target, scales=None) -> None:
        """Start copies of (source, is read once) into the blocks of stage ``number``.

        target: ``blocks`` or ``weights``. scales: called with the words of the stage.
        """
        before = self.stage(number + (self.stages - self.under_way))
        pl.when(number >= self.under_way)(lambda: plgpu.barrier_wait(self.full.at[before]))
        stage = self.acquire(number)
        for i, (source, once) in enumerate(copies):
            plgpu.copy_gmem_to_smem(source, target.at[stage, i], self.full.at[stage])
            if once:
                evict_first()
        if scales is not None:
            scales(self.words.at[stage])
        if self.words is not None:
            arrive_after_copies()


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCta:
    """A CTA's part of the layer.

    ``few_bits`` has the four products by name, or none with 16-bit weights; ``prefetched_position``
    is the row's position, a load by `prefetch`, or None as long as only weights may be read.
    """

    sizes: LayerSizes
    inputs: dict[str, Any]
    few_bits: dict[str, FewBits]
    pages: tuple[Any, Any]
    current: Any
    outputs: tuple[Any, Any]
    scratch: dict[str, Any]
    ring: Ring
    cta: Any
    scale: float
    eps: float
    head_eps: float
    prefetched_position: Any = None

    # The units of a CTA, the same for producer and consumers

    def _for_units(self, product: Product, run, number):
        """Run all units; the stages used after them, with ``number`` used before.

        It calls ``run(i, tile, split, first step, steps, number)`` for the i-th unit.
        """

        def step(i, number):
            tile, split, start, count = _part(product, self.cta + i * self.sizes.ctas)
            run(i, tile, split, start, count, number)
            return number + count

        units = lax.div(product.units - self.cta + self.sizes.ctas - 1, self.sizes.ctas)
        return lax.fori_loop(0, units, step, number)

    @property
    def _row(self) -> Row:
        return Row(self.scratch["row"], self.scratch.get("powers"))

    @property
    def _position(self):
        """Position of the row, at least 0, int32."""
        return jnp.maximum(await_prefetch(self.prefetched_position), 0)

    @property
    def _chunks(self):
        """Chunks of 64 tokens, the row's own included."""
        return lax.div(self._position, TILE) + 1

    @property
    def _attention_unit(self):
        """(unit, split, chunks of the split); CTAs beyond the units have 0 chunks."""
        per_split = self.sizes.K * self.sizes.passes
        unit, split = lax.rem(self.cta, per_split), lax.div(self.cta, per_split)
        splits = self.sizes.kv_splits
        mine = lax.div(jnp.maximum(self._chunks - split + splits - 1, 0), splits)
        return unit, split, jnp.where(split < splits, mine, 0)

    # Producer

    def produce_qkv(self):
        """Copy the weights of the first product; return the number of stages used."""
        return self._produce(self.sizes.qkv, "qkv", jnp.int32(0))

    def produce(self, other, number=None) -> None:
        """Copy all blocks of the CTA, in the order of the stages; empty the other words.

        number: stages used, where the weights of the first product are copied already.
        """
        sizes = self.sizes
        first_page = self._page(jnp.int32(0))
        number = self.produce_qkv() if number is None else number
        _empty(other, self.cta, sizes)
        number = self._produce_kv(number, first_page)
        number = self._produce(sizes.output, "output", number)
        number = self._produce(sizes.gate_up, "gate_up", number)
        self._produce(sizes.down, "down", number)

    def _produce(self, product: Product, name: str, number):
        weight, few = self.inputs[name], self.few_bits.get(name)

        def unit(i, tile, split, start, count, number):
            del i, split
            firsts = [pl.multiple_of(first, TILE) for first in product.first_columns(tile)]

            def stage(i, _):
                depth = pl.multiple_of((start + i) * product.step, product.step)
                copies = [(block, True) for block in _blocks(weight, product, firsts, depth)]
                scales = None if few is None else few.scales
                copy = scales and functools.partial(scales.copy, columns=firsts, depth=depth)
                self.ring.copy(number + i, copies, self.ring.weights, copy)

            lax.fori_loop(0, count, stage, None)

        return self._for_units(product, unit, number)

    def _page(self, i):
        """Prefetch the page of the i-th chunk of this CTA's split, or some entry of the table."""
        _, split, _ = self._attention_unit
        table = self.inputs["page_table"]
        number = jnp.minimum(split + i * self.sizes.kv_splits, table.shape[1] - 1)
        return prefetch(table, 0, number)

    def _produce_kv(self, number, first_page):
        unit, _, chunks = self._attention_unit
        head, blocks = lax.div(unit, self.sizes.passes), self.sizes.head_blocks

        def chunk(i, page):
            following = self._page(i + 1)  # before the ring is full
            page = jnp.maximum(await_prefetch(page), 0)
            of_page = [pages.at[page, head] for pages in self.pages]
            parts = [
                (one.at[:, pl.ds(block * TILE, TILE)], False)
                for one in of_page
                for block in range(blocks)
            ]
            for j in range(blocks):
                copies = parts[2 * j : 2 * j + 2]
                self.ring.copy(number + i * blocks + j, copies, self.ring.blocks)
            return following

        lax.fori_loop(0, chunks, chunk, first_page)
        return number + chunks * blocks

    # Consumers

    def consume(self) -> None:
        """Compute the stages one after the other."""
        sizes, inputs, scratch = self.sizes, self.inputs, self.scratch
        residual, partial = self.outputs
        stream, row, totals = scratch["stream"], self._row, scratch["totals"]
        kv_head = lax.div(self._attention_unit[0], sizes.passes)
        normed_row(
            inputs["x"],
            inputs["summands"],
            None,
            inputs["attention_norm"],
            stream,
            row,
            totals.at[0],
            self.cta,
            eps=self.eps,
            overlap=tables(inputs, scratch["tables"], kv_head, sizes),
        )
        number = self._multiply("qkv", jnp.int32(0), None, sizes.qkv_words)
        number = self._attend(number)

        splits = jnp.minimum(self._chunks, sizes.kv_splits)
        heads = sizes.N // sizes.output.splits

        def merge(split, start, count):
            del start, count
            merged_row(self.current, row, split * heads, splits, sizes)

        number = self._multiply("output", number, merge, sizes.output_words)
        mlp_norm = scratch["tables"].at[pl.ds(TablePlaces.of(sizes).mlp_norm, sizes.D)]
        normed_row(
            stream,
            self.current,
            residual,
            mlp_norm,
            stream,
            row,
            totals.at[1],
            self.cta,
            eps=self.eps,
            words_at=(sizes.output_words, sizes.output.splits),
        )
        number = self._multiply("gate_up", number, None, sizes.gate_up_words)

        def activate(split, start, count):
            del split
            step = sizes.down.step
            activated_row(self.current, row, start * step, count * step, sizes)

        self._multiply("down", number, activate, 0, partial)

    def _multiply(self, name: str, number, fill, words_at: int, target=None):
        """Multiply and send; ``fill(split, first step, steps)`` computes the unit's row."""
        product: Product = getattr(self.sizes, name)
        few, sums = self.few_bits.get(name), self.scratch["sums"]
        target = self.current if target is None else target
        batches = gemv.BATCHES if few is None else few_bit_gemv.BATCHES

        def unit(turn, tile, split, start, count, number):
            columns = tuple(product.first_columns(tile))
            scaled = few is not None and few.channels is not None
            factors = few_bit_gemv.channel_scales(few.channels, columns) if scaled else None
            if fill is not None:
                fill(split, start, count)
            skipped = start if fill is not None else jnp.int32(0)

            def batch(size: int, done):
                def step(i, found):
                    begin = done + i * size
                    used = [self.ring.wait(number + begin + j) for j in range(size)]
                    steps = [start + begin + j for j in range(size)]
                    found = self._multiplied(found, name, used, steps, skipped, columns)
                    for stage in used:
                        self.ring.release(stage)
                    return found

                return step

            found, done = gemv.no_sums(), jnp.int32(0)
            for size in batches:
                turns = lax.div(count - done, size)
                found = lax.fori_loop(0, turns, batch(size, done), found)
                done = done + turns * size
            before = words_at + split * product.matrices * product.columns
            places = tuple(before + column for column in columns)
            line_of = None if few is None else few_bit_gemv.line_of
            # Two by turns: slow threads may still read those of the unit before.
            gemv.send_sums(found, sums.at[lax.rem(turn, 2)], target, places, factors, line_of)

        return self._for_units(product, unit, number)

    def _multiplied(self, found, name: str, used, steps, skipped, columns):
        """The sums with the products of stages ``used``, which are ``steps`` of the depth.

        skipped: steps before the first number of the row in shared memory.
        """
        product, row = getattr(self.sizes, name), self._row
        firsts = [(step - skipped) * product.step for step in steps]
        blocks = [self.ring.blocks.at[stage] for stage in used]
        if name not in self.few_bits:
            further = TILE if product.is_deep else 0
            both = tuple(at for first in firsts for at in (first, first + further))
            return gemv.multiplied(found, tuple(blocks), row.numbers, both)
        words = [None if self.ring.words is None else self.ring.words.at[stage] for stage in used]
        depths = [step * product.step for step in steps]
        stages = [few_bit_gemv.Stage(*of) for of in zip(blocks, firsts, depths, words, strict=True)]
        return few_bit_gemv.multiplied(found, stages, row, self.few_bits[name], columns)

    def _attend(self, number):
        sizes, scratch, inputs = self.sizes, self.scratch, self.inputs
        unit, split, chunks = self._attention_unit
        blocks = sizes.head_blocks
        heads, new_scores = scratch["heads"], scratch["new_scores"]
        last = lax.div(self._position, TILE)
        has_new = lax.rem(last, sizes.kv_splits) == split

        @pl.when(chunks > 0)
        def _():
            heads_of.rotated_heads(
                self.current,
                scratch["tables"],
                heads,
                new_scores,
                unit,
                has_new.astype(jnp.int32),
                sizes=sizes,
                scale=self.scale,
                eps=self.head_eps,
                normed="q_norm" in inputs,
                biased="qkv_bias" in inputs,
            )

            def chunk(i, state):
                begin = number + i * blocks
                used = [self.ring.wait(begin + j) for j in range(blocks)]
                keys, values = (self.ring.blocks.at[stage] for stage in (used[0], used[-1]))
                tokens = self._position - (split + i * sizes.kv_splits) * TILE
                state = heads_of.attended(state, keys, values, heads, tokens, sizes=sizes)
                for stage in used:
                    self.ring.release(stage)
                return state

            state = lax.fori_loop(0, chunks, chunk, heads_of.no_attention(sizes))
            heads_of.send_attention(
                state,
                heads,
                new_scores,
                scratch["by_warp"],
                self.current,
                unit,
                split,
                has_new.astype(jnp.int32),
                sizes=sizes,
            )

            @pl.when(has_new & (lax.rem(unit, sizes.passes) == 0))
            def _():
                kv_head = lax.div(unit, sizes.passes)
                heads_of.write_kv(scratch["tables"], heads, *self.pages, kv_head, sizes)

        return number + chunks * blocks


def _blocks(weight, product: Product, firsts, depth):
    """The two blocks of a stage; weight: [D, X], or [X, D] in few bits."""
    if product.bits < 16:
        return [weight.at[pl.ds(first, TILE), pl.ds(depth, product.step)] for first in firsts]
    further = TILE if product.is_deep else 0
    places = ((depth, firsts[0]), (depth + further, firsts[-1]))
    return [weight.at[pl.ds(row, TILE), pl.ds(column, TILE)] for row, column in places]


def _part(product: Product, unit):
    """(tile, split, first step, steps) of a unit."""
    tile, split = lax.rem(unit, product.tiles), lax.div(unit, product.tiles)
    start = lax.div(split * product.steps, product.splits)
    return tile, split, start, lax.div((split + 1) * product.steps, product.splits) - start


def _empty(words, cta, sizes: LayerSizes) -> None:
    """Empty words of the launch before, by the producer's threads of all CTAs."""

    def emit(words, cta):
        step = sizes.ctas * 128
        mine = add(mul(cta, 128), add(mgpu.utils.thread_idx(), -CONSUMERS))
        loop = scf.ForOp(mul(mine, 4), i32(sizes.words), i32(4 * step), [])
        with ir.InsertionPoint(loop.body):
            at = address(words, mul(loop.induction_variable, 4))
            store_words(at, [i32(EMPTY)] * 4, "")
            scf.yield_([])

    simt(emit, (words,), (cta,))
