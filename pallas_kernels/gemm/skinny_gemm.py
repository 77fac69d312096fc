"""Skinny GEMM on Hopper (Mosaic GPU): few rows, weights streamed once through shared memory.

One CTA computes a column tile of W matrices over one split of the depth (the contracted axis). A
producer warpgroup copies blocks of weights and rows (TMA) through a pipeline in shared memory. One
consumer warpgroup for each 64 rows multiplies them (wgmma) and passes the accumulators to the
epilogue. Bytes moved: the weights once from device memory, with the L2 policy evict_first; the rows
once per column tile, from the L2 cache; the output of the epilogue.

The first weights may arrive while the kernels before still run (`begin_kernel`).

wgmma takes 64 rows. A pipeline stage holds only the real rows, and the instruction reads beyond
them into the following stages. Rows of a GEMM are independent, so those results are dropped.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.gemv_row import (
    DEPTH_MULTIPLE,
    MAX_ROW_COLUMNS,
    SWIZZLE_ATOM_ROWS,
    RowSource,
    SmemRow,
    StoredRow,
)
from rjax.pallas_kernels.mosaic.emit import SCALAR, begin_kernel
from rjax.pallas_kernels.mosaic.pipeline import Pipeline
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_ACC = plgpu.WGMMAAccumulatorRef
ROWS = (1, 8, 16, 32, 64, 128)
"""Supported row counts."""

_WGMMA_M = 64  # rows of an instruction
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # per thread, with two consumers
_MAX_STAGES = 8  # more are not faster


@dataclasses.dataclass(frozen=True, slots=True)
class GemmConfig:
    """Block sizes and stages of a GEMM.

    Attributes:
        block_n: columns of a CTA, of each matrix: 64 or 128.
        block_k: depth of a pipeline stage, a multiple of 64.
        split_k: splits of the depth, each computed by its own CTAs.
        num_stages: pipeline stages.
    """

    block_n: int
    block_k: int
    split_k: int
    num_stages: int


def pipeline_stages(
    rows: int, depth: int, *, block_n: int, block_k: int, split_k: int, smem_bytes: int
) -> int:
    """Pipeline stages that fit in ``smem_bytes``; ``block_n`` is the sum over all matrices."""
    blocks = -(-depth // block_k // split_k)  # depth blocks of a CTA
    if rows == 1:  # the CTA's whole slice of the row is in shared memory
        fixed, per_stage = _h_smem_rows(rows, blocks) * block_k * 2, block_n * block_k * 2
    else:  # padding that the instruction reads behind the last stage
        fixed, per_stage = max(0, _WGMMA_M - rows) * block_k * 2, (block_n + rows) * block_k * 2
    return max(2, min(_MAX_STAGES, (smem_bytes - fixed) // per_stage, blocks))


def _h_smem_rows(rows: int, count: int) -> int:
    """Rows of shared memory for ``count`` stages, or for one row of ``count`` depth blocks."""
    return (count - 1) * max(rows, SWIZZLE_ATOM_ROWS) + max(rows, _WGMMA_M)


def refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot multiply [rows, depth] with [depth, columns], or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"operands are {jnp.dtype(dtype)}; the kernel takes one 16-bit dtype"
    if rows not in ROWS:
        return f"{rows} rows; the kernel takes {', '.join(map(str, ROWS))}, so pad them"
    multiple = DEPTH_MULTIPLE if rows == 1 else 64
    if depth % multiple or columns % 64:
        return (
            f"weights of {depth} x {columns}; with {rows} rows the kernel takes multiples of "
            f"{multiple} x 64"
        )
    return None


def row_refusal(depth: int, columns: int) -> str | None:
    """Why a CTA cannot hold ``columns`` of the ``depth`` columns of one row, or None."""
    if columns > MAX_ROW_COLUMNS:
        return (
            f"a row of {depth} columns, {columns} per CTA; with one row a CTA takes at most "
            f"{MAX_ROW_COLUMNS}, so pad it to {ROWS[1]} rows"
        )
    return None


def skinny_gemm(
    name: str,
    h: Float[Array, "T D"] | RowSource,
    w: Float[Array, "D W E"],
    config: GemmConfig,
    out: jax.ShapeDtypeStruct,
    epilogue: Callable[..., None],
    *,
    early_weights: bool = False,
) -> tuple[Array, ...]:
    """Compute h @ w[:, i] for all i; return the output of the epilogue and of a RowSource.

    Args:
        name: kernel name in profiles.
        h, w: bfloat16 or float16, the same for both; see ``refusal``. A RowSource computes one row
            inside the kernel.
        config: ``block_n`` divides E.
        out: shape and dtype of the output.
        epilogue: called with (output in GMEM, W accumulators of the CTA, each float32
            [64, block_n] in WGMMA layout, index of the split, first row, first column); stores the
            existing rows (``store_rows``).
        early_weights: whether no kernel of the program writes w, so that it may be read early.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    source = h if isinstance(h, RowSource) else StoredRow(h) if h.shape[0] == 1 else None
    (T, D), (_, W, E), dtype = h.shape, w.shape, h.dtype
    if dtype != w.dtype:
        raise ValueError(f"h is {dtype} and w {w.dtype}; the kernel takes one 16-bit dtype")
    blocks = -(-D // config.block_k // config.split_k)
    why = refusal(T, D, E, dtype) or (row_refusal(D, blocks * config.block_k) if T == 1 else None)
    if why is not None:
        raise ValueError(why)
    block_n, block_k, stages = config.block_n, config.block_k, config.num_stages
    consumers = -(-T // _WGMMA_M)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    operands, results = (h,), ()
    if source is not None:
        operands, results = source.operands, source.results
    assert source is None or block_k == 64

    def kernel(*refs, h_smem, w_smem, full, empty, scratch=None):
        """GMEM: h [T, D] or the operands of the row source, w [D, W, E], out, other results. SMEM:
        h_smem [rows of all stages or swizzle atoms of one row, block_k], w_smem
        [stages, W, block_k, block_n], scratch [4]. Barriers, one per stage: full, empty."""
        begin_kernel(early_weights)
        inputs, [w, out, *others] = refs[: len(operands)], refs[len(operands) :]
        column = pl.multiple_of(lax.axis_index("column") * block_n, block_n)
        split = lax.axis_index("split")
        all_blocks = jnp.int32(D // block_k)
        start = lax.div(split * all_blocks, jnp.int32(config.split_k))
        count = lax.div((split + 1) * all_blocks, jnp.int32(config.split_k)) - start
        wg = lax.axis_index("wg")
        pipeline = Pipeline(full, empty, stages)

        @pl.when(wg == consumers)
        def _producer():
            if consumers > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def depth_of(i):
                return pl.ds(pl.multiple_of((start + i) * block_k, block_k), block_k)

            def load_weights(i, stage):
                for which in range(W):
                    tile = w.at[depth_of(i), which, pl.ds(column, block_n)]
                    plgpu.copy_gmem_to_smem(tile, w_smem.at[stage, which], full.at[stage])
                    evict_first()

            def load_rows(i, stage):
                if source is None:
                    tile, place = inputs[0].at[:, depth_of(i)], pl.multiple_of(stage * T, T)
                    plgpu.copy_gmem_to_smem(tile, h_smem.at[pl.ds(place, T)], full.at[stage])

            pipeline.fill(count, load_weights, load_rows, early=early_weights)

        @pl.when(wg < consumers)
        def _consumer():
            if consumers > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            first_row = wg * _WGMMA_M if consumers > 1 else jnp.int32(0)
            if early_weights:
                plgpu.griddepcontrol_wait()
            if source is not None:
                columns = (start * block_k, count * block_k, blocks * block_k, D)
                is_first = (column == 0) & (split == 0)
                source.fill(inputs, others, SmemRow(h_smem, swizzled, *columns), scratch, is_first)
                plgpu.commit_smem()

            def accumulate(*accs):
                def step(i, _):
                    stage = pipeline.wait(i)
                    if source is None:
                        row = pl.multiple_of(stage * T + first_row, min(T, _WGMMA_M))
                    else:
                        row = pl.multiple_of(i * SWIZZLE_ATOM_ROWS, SWIZZLE_ATOM_ROWS)
                    for which, acc in enumerate(accs):
                        h_tile = h_smem.at[pl.ds(row, _WGMMA_M)]
                        plgpu.wgmma(acc, h_tile, w_smem.at[stage, which])
                    plgpu.wgmma_wait(W)  # the wgmma of the previous stage are done
                    previous = pipeline.stage(i + stages - 1)
                    pl.when(i > 0)(lambda: pipeline.release(previous))

                lax.fori_loop(0, count, step, None)
                plgpu.wgmma_wait(0)
                return tuple(acc[...] for acc in accs)

            accs = pl.run_scoped(accumulate, *[_ACC((_WGMMA_M, block_n), jnp.float32)] * W)
            epilogue(out, accs, split, first_row, column)

    kernel.__name__ = name
    scratch = {} if source is None else {"scratch": plgpu.SMEM((4,), jnp.float32)}
    return plgpu.kernel(
        kernel,
        out_type=(out, *results),
        scratch_types=dict(
            w_smem=plgpu.SMEM((stages, W, block_k, block_n), dtype, transforms=swizzled),
            h_smem=plgpu.SMEM(
                (_h_smem_rows(T, stages if source is None else blocks), block_k),
                dtype,
                transforms=swizzled,
            ),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=W + (source is None)),
            empty=plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
        )
        | scratch,
        grid=(E // block_n, config.split_k),
        grid_names=("column", "split"),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*operands, w)


def store_rows(ref, value, first_row, column) -> None:
    """``ref[first_row + row, column + c] = value[row, c]`` for rows below T.

    ref: [T, E] in GMEM; value: [64, X] in WGMMA layout, of ref's dtype; first_row: int32; column:
    int32, even.
    """
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def store(_, ref_, value_, first_row_, column_):
        index = ir.IndexType.get()
        start_row, start_column = (
            arith.index_cast(index, start.registers.flat[0]) for start in (first_row_, column_)
        )
        indices = value_.layout.thread_idxs(value_.shape)
        for (row, at), register in zip(indices, value_.registers.flat, strict=True):
            [vector_size] = register.type.shape
            size = vector_size * mgpu.utils.bitwidth(register.type.element_type) // 8
            row = arith.addi(start_row, row)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(T, index))):
                target = [row, arith.addi(start_column, at)]
                vector.store(register, ref_, target, alignment=size)

    store(ref, value, first_row, column)
