"""What a CTA does for a launch: the copies of its two producers, the work of its consumer.

The three warpgroups go over the same units in the same order and count the same blocks, so they
meet only at the barriers of two pipelines. Weights depend on no other CTA: their producer runs
ahead over the ends of products, as far as there are stages. The producer of the rows waits for the
CTAs that compute them.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from rjax.pallas_kernels.layer.post_attention_block.sizes import WGMMA_M, BlockSizes, Product
from rjax.pallas_kernels.mosaic.emit import SCALAR, THREADS, thread_index
from rjax.pallas_kernels.mosaic.pipeline import Pipeline
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_ACC = plgpu.WGMMAAccumulatorRef


def _release(pipeline: Pipeline, block) -> None:
    """``release`` of a warpgroup whose wgmma are done, by one thread for all 128.

    wgmma are done for all threads of a warpgroup at once. A predicate, not a branch: with a branch
    by thread between them, ptxas serialises all wgmma of the kernel (C7520).
    """
    pipeline.release(pipeline.stage(block))

    @plgpu.inline_mgpu(arg_types=())
    def replace(_):
        arrival = list(ir.InsertionPoint.current.block.operations)[-1]
        line = arrival.asm_string.value
        assert "mbarrier.arrive" in line and line.endswith(", 1;"), line
        count = len(list(arrival.operands_))
        once = line.removesuffix(" 1;") + f" {THREADS};"
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [*arrival.operands_, thread_index()],
            f"{{ .reg .pred p; setp.eq.u32 p, ${count}, 0; @p {once} }}",
            arrival.constraints.value + ",r",
            has_side_effects=True,
        )
        arrival.operation.erase()

    replace()


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCta:
    """A CTA's part of the products.

    Attributes:
        sizes: sizes of the launch's products, and of the CTA's pipelines.
        cta: int32, index of the CTA.
        weights: pipeline of blocks [step, tile] of one matrix.
        rows: pipeline of blocks of ``sizes.rows`` rows of ``step`` inputs.
        w_smem, h_smem: SMEM of both, the stages of rows one behind the other.
    """

    sizes: BlockSizes
    cta: Any
    weights: Pipeline
    rows: Pipeline
    w_smem: Any
    h_smem: Any

    def _for_units(self, product: Product, run: Callable, carry):
        """Run ``carry = run(column, split, first step, carry)`` for each unit; the last carry."""
        tiles, ctas = jnp.int32(product.tiles), jnp.int32(self.sizes.ctas)

        def unit(i, carry):
            index = self.cta + i * ctas
            column = pl.multiple_of(lax.rem(index, tiles) * product.tile, product.tile)
            split = lax.div(index, tiles)
            return run(column, split, split * product.steps, carry)

        units = lax.div(jnp.int32(product.units) - self.cta + ctas - 1, ctas)
        return lax.fori_loop(0, units, unit, carry)

    def produce_weights(self, product: Product, weight, numbers):
        """Copy the weights of all units.

        What other CTAs send waits behind weights that are under way. So few are under way while
        stages are filled ahead, and more once the consumer waits for them.

        weight: GMEM [depth, matrices, columns]. numbers: (blocks used, blocks known to be filled)
        before, and the result after.
        """
        matrices, sizes = product.matrices, self.sizes
        first, _ = numbers

        def unit(column, split, start, carry):
            del split

            def copy(i, carry):
                depth = pl.ds(pl.multiple_of((start + i) * sizes.step, sizes.step), sizes.step)
                for which in range(matrices):
                    number, filled = carry
                    ahead = number - first < sizes.weight_stages
                    limit = jnp.where(ahead, sizes.under_way_ahead, sizes.under_way)
                    filled = self._wait_until_filled(filled, number - limit)
                    stage = self.weights.acquire(number)
                    tile = weight.at[depth, which, pl.ds(column, product.tile)]
                    target, full = self.w_smem.at[stage], self.weights.full.at[stage]
                    plgpu.copy_gmem_to_smem(tile, target, full)
                    evict_first()
                    carry = number + 1, filled
                return carry

            return lax.fori_loop(0, product.steps, copy, carry)

        return self._for_units(product, unit, numbers)

    def _wait_until_filled(self, filled, target):
        """Wait for the blocks before ``target``, each once; return how many are known filled."""

        def wait(i, _):
            self.weights.wait(i)

        lax.fori_loop(filled, jnp.maximum(filled, target), wait, None)
        return jnp.maximum(filled, target)

    def produce_rows(self, product: Product, rows, number):
        """Copy the rows of all units.

        rows: GMEM [T, depth]. number: blocks used before, and the result after.
        """
        T, step = self.sizes.rows, self.sizes.step

        def unit(column, split, start, number):
            del column, split

            def copy(i, _):
                stage = self.rows.acquire(number + i)
                tile = rows.at[:, pl.ds(pl.multiple_of((start + i) * step, step), step)]
                place = pl.ds(pl.multiple_of(stage * T, T), T)
                plgpu.copy_gmem_to_smem(tile, self.h_smem.at[place], self.rows.full.at[stage])

            lax.fori_loop(0, product.steps, copy, None)
            return number + product.steps

        return self._for_units(product, unit, number)

    def multiply(self, product: Product, epilogue: Callable, numbers):
        """Multiply all units; ``epilogue(accumulators, split, column)`` stores each.

        The weights are the left operand, so that few rows are few columns of wgmma. Accumulators:
        float32 [64, T], for every 64 columns of the tile of each matrix.

        numbers: (blocks of weights, blocks of rows) used before, and the result after.
        """
        first_weight, first_row = numbers
        matrices, T, blocks = product.matrices, self.sizes.rows, product.tile // WGMMA_M

        def unit(column, split, start, done):
            del start

            def release(i) -> None:
                for which in range(matrices):
                    _release(self.weights, first_weight + (done + i) * matrices + which)
                _release(self.rows, first_row + done + i)

            def accumulate(*accs):
                def step(i, _):
                    stage = self.rows.wait(first_row + done + i)
                    rows = self.h_smem.at[pl.ds(pl.multiple_of(stage * T, T), T)]
                    for which in range(matrices):
                        at = self.weights.wait(first_weight + (done + i) * matrices + which)
                        for block in range(blocks):
                            columns = pl.ds(block * WGMMA_M, WGMMA_M)
                            weights = self.w_smem.at[at, :, columns].transpose((1, 0))
                            acc = accs[which * blocks + block]
                            plgpu.wgmma(acc, weights, rows.transpose((1, 0)))
                    plgpu.wgmma_wait(len(accs))  # the wgmma of the previous step are done
                    pl.when(i > 0)(lambda: release(i - 1))

                lax.fori_loop(0, product.steps, step, None)
                plgpu.wgmma_wait(0)
                release(product.steps - 1)
                return tuple(acc[...] for acc in accs)

            accumulators = [_ACC((WGMMA_M, T), jnp.float32)] * (matrices * blocks)
            epilogue(pl.run_scoped(accumulate, *accumulators), split, column)
            return done + product.steps

        done = self._for_units(product, unit, jnp.int32(0))
        return first_weight + done * matrices, first_row + done


def store_transposed(ref, value, column) -> None:
    """``ref[t, column + n] = value[n, t]``.

    ref: [T, E] in GMEM; value: [64, T] in WGMMA layout, of ref's dtype; column: int32.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR))
    def store(_, ref_, value_, column_):
        start = arith.index_cast(ir.IndexType.get(), column_.registers.item())
        indices = value_.layout.thread_idxs(value_.shape)
        for (at, row), register in zip(indices, value_.registers.flat, strict=True):
            [size] = register.type.shape
            for i in range(size):
                number = vector.extract(register, [], [i])
                target = [arith.addi(row, mgpu.c(i, row.type)), arith.addi(start, at)]
                memref.store(number, ref_, target)

    store(ref, value, column)
