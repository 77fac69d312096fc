"""The input row of a GEMV, computed by every CTA while its first weights are loaded.

The residual sum and norm of one row, or the merge of its partial attention results, read few
bytes, so every CTA of the following GEMV can repeat them. That saves a kernel launch, and the
weights stream from device memory without a gap. With more rows, every CTA would read too much.

The row is stored in shared memory in wgmma layout, one row in each swizzle atom of eight rows. The
other seven rows hold stale data; their results are dropped.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float

from rjax.pallas_kernels.attention.relay_fusion.mosaic import merge_entries
from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    store_strided,
    thread_index,
    widest_vector,
)
from rjax.pallas_kernels.pending import Partial, UnmergedAttention

MAX_ROW_COLUMNS = 5120
"""Most columns of the row that a CTA holds; more would leave too little memory for weights."""

SWIZZLE_ATOM_ROWS = 8
DEPTH_MULTIPLE = 128  # the depth of one row is a multiple of it
_ATOM_BYTES = 128  # of a row in a swizzle atom
_CHUNK = 64  # columns of a slice are a multiple of it


@dataclasses.dataclass(frozen=True, slots=True)
class SmemRow:
    """The CTA's slice of the row in shared memory.

    Attributes:
        ref: SMEM, tiled and swizzled for wgmma: [SWIZZLE_ATOM_ROWS, columns], or for a row that is
            the left operand [SWIZZLE_ATOM_ROWS for each 64 columns plus padding, 64].
        transforms: tiling and swizzle transforms of ``ref``.
        start, columns: first column and number of columns of the slice, int32, multiples of 64.
        max_columns: most columns of any CTA's slice.
        depth: columns of the row.
        scale: SMEM, float32 [1, SWIZZLE_ATOM_ROWS], the scale of a quantised row; else None.
    """

    ref: Any
    transforms: tuple[Any, ...]
    start: Any
    columns: Any
    max_columns: int
    depth: int
    scale: Any = None

    def chunks(self) -> tuple[int, list[Any]]:
        """(elements per thread, first columns) of chunks that cover the slice.

        A chunk has 128 times that many columns; chunks may reach beyond the slice.
        """
        step = next(
            s for s in (8, 4, 2, 1) if _round_up(self.max_columns, s * THREADS) <= self.depth
        )
        size = step * THREADS
        count = _round_up(self.max_columns, size) // size
        first = jnp.minimum(self.start, self.depth - count * size)
        return step, [pl.multiple_of(first + i * size, _CHUNK) for i in range(count)]

    def store(self, value, first, layout) -> None:
        """Store the columns of ``value`` that are in the slice.

        value: [X] of the slice's dtype in a WG_STRIDED layout, columns ``first`` (int32) to
        ``first`` + X.
        """
        arguments = (
            plgpu.RefType(self.transforms),
            layout,
            *(SCALAR for _ in range(3)),
        )

        @plgpu.inline_mgpu(arg_types=arguments)
        def emit(_, row_, value_, first_, start_, columns_):
            i32 = ir.IntegerType.get_signless(32)
            [first], [start], [columns] = (x.registers.flat for x in (first_, start_, columns_))
            offset = arith.subi(first, start)
            itemsize = self.ref.dtype.itemsize
            for i, register in enumerate(value_.registers.flat):
                [vector_size] = register.type.shape
                at = arith.addi(
                    arith.muli(thread_index(), mgpu.c(vector_size, i32)),
                    mgpu.c(i * THREADS * vector_size, i32),
                )
                column = arith.addi(offset, at)
                # Compared unsigned: columns before the slice are large numbers.
                inside = arith.cmpi(arith.CmpIPredicate.ult, column, columns)
                with mgpu.when(inside):
                    target = self._target(column)
                    vector.store(register, row_, target, alignment=itemsize * vector_size)

        emit(self.ref, value, first, self.start, self.columns)

    def _target(self, column) -> list[Any]:
        """Indices of a column (int32) of the slice in ``ref``, whose memref is tiled."""
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        atom_columns = mgpu.c(_ATOM_BYTES // self.ref.dtype.itemsize, i32)
        atom, offset_in_it = (
            arith.index_cast(index, divide(column, atom_columns))
            for divide in (arith.divui, arith.remui)
        )
        zero = mgpu.c(0, index)
        in_line = self.ref.shape[0] == SWIZZLE_ATOM_ROWS
        return [*([zero, atom] if in_line else [atom, zero]), zero, offset_in_it]


class RowSource(abc.ABC):
    """Computes the row inside the GEMV; `skinny_gemm` takes it in place of an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(1, D)."""
        return self.row.shape

    @property
    def dtype(self) -> jnp.dtype:
        """A 16-bit dtype."""
        return self.row.dtype

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[Array, ...]:
        """Arrays that the kernel reads."""

    @property
    @abc.abstractmethod
    def row(self) -> jax.ShapeDtypeStruct:
        """Shape [1, D] and dtype of the row."""

    @property
    def smem_dtype(self) -> jnp.dtype:
        """Dtype of the row in shared memory."""
        return self.dtype

    @property
    def shares_sm(self) -> bool:
        """Whether ``fill`` needs so few registers and bytes that two CTAs may share an SM."""
        return False

    @property
    def read_bytes(self) -> int:
        """Bytes that a CTA reads if its slice is the whole row."""
        return sum(each.size * each.dtype.itemsize for each in self.operands)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Further outputs of the kernel."""
        return ()

    @abc.abstractmethod
    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        """Compute the CTA's slice of the row into ``smem_row``; called by one warpgroup.

        refs, results: ``operands`` and ``results`` in GMEM. scratch: float32 [4] SMEM. is_first:
        bool, whether this CTA writes the results.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class StoredRow(RowSource):
    """A row in device memory."""

    h: Float[Array, "1 D"]

    @property
    def operands(self) -> tuple[Array, ...]:
        return (self.h,)

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.h.shape, self.h.dtype)

    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        del results, scratch, is_first
        [h] = refs
        step, firsts = smem_row.chunks()
        layout = strided(step)
        values = [read_chunk(h.at[0], first, step) for first in firsts]
        for value, first in zip(values, firsts, strict=True):
            smem_row.store(value, first, layout)


@dataclasses.dataclass(frozen=True, slots=True)
class MergedRow(RowSource):
    """The attention output of a row, merged from its partial results."""

    attention: UnmergedAttention

    @property
    def operands(self) -> tuple[Array, ...]:
        attention = self.attention
        partial_out = attention.partial_out
        flat = (attention.out.reshape(1, -1), partial_out.reshape(len(partial_out), -1))
        return (*flat, attention.partial_lse, attention.merge_indptr)

    @property
    def read_bytes(self) -> int:
        return 0  # of few partial results; their number is not known

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        _, N, H = self.attention.shape
        return jax.ShapeDtypeStruct((1, N * H), self.attention.out.dtype)

    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        del results, scratch, is_first
        out, partial_out, partial_lse, indptr = refs
        H, dtype = self.attention.shape[2], self.attention.out.dtype
        step, firsts = smem_row.chunks()
        layout = strided(step)
        begin, end = indptr[0], indptr[1]
        for first in firsts:

            def store(merged, _, first=first):
                smem_row.store(merged.astype(dtype), first, layout)

            @pl.when(end - begin == 1)
            def _(first=first):
                smem_row.store(read_chunk(out.at[0], first, step), first, layout)

            @pl.when(end - begin != 1)
            def _(first=first, store=store):
                merge_entries(partial_out, partial_lse, begin, end, first, step, H, store)


@dataclasses.dataclass(frozen=True, slots=True)
class NormedRow(RowSource):
    """The RMSNorm of a residual sum, as ``add_rms_norm`` with T = 1; the sum is a result too."""

    x: Float[Array, "1 D"]
    update: Float[Array, "1 D"] | Partial
    weight: Float[Array, " D"]
    eps: float

    @property
    def operands(self) -> tuple[Array, ...]:
        update = self.update.summands if isinstance(self.update, Partial) else self.update
        return (self.x, update, self.weight)

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.x.shape, self.x.dtype)

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (self.row,)

    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        smem_row.store(*self.whole(refs, results, scratch, is_first))

    def whole(self, refs, results, scratch, is_first) -> tuple[Any, Any, Any]:
        """(the row [D], its first column, its layout), in registers; arguments as in ``fill``."""
        x, update, weight = refs
        [residual_ref] = results
        D, dtype = self.x.shape[1], self.x.dtype
        layout = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

        def read(ref):
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        if len(update.shape) == 2:
            added = read(update.at[0])
        else:
            added = read(update.at[0, 0])
            for i in range(1, update.shape[0]):
                added = added + read(update.at[i, 0])
            added = added.astype(dtype).astype(jnp.float32)
        scale = read(weight)
        residual = (read(x.at[0]) + added).astype(dtype)
        pl.when(is_first)(lambda: store_strided(residual_ref.at[0], residual, layout))
        y = residual.astype(jnp.float32)
        mean = reduce_warpgroup("add", y * y, layout, scratch) * (1.0 / D)
        return (y * lax.rsqrt(mean + self.eps) * scale).astype(dtype), jnp.int32(0), layout


def reduce_warpgroup(kind: str, values, layout, scratch):
    """The sum ("add") or largest ("max") of float32 [X] in ``layout``; scratch: float32 [4] SMEM.

    ``jnp.sum`` would reduce over all warpgroups of the CTA.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
    )
    def reduced(_, values_, scratch_):
        return values_.reduce(kind, 0, scratch_)

    return reduced(values, scratch)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def strided(step: int):
    """The layout of 128 * step columns with ``step`` neighbours a thread."""
    return plgpu.Layout.WG_STRIDED((step * THREADS,), vec_size=step)


def read_chunk(ref, first, step: int):
    """128 * step columns of ``ref`` from ``first`` on."""
    return plgpu.load(ref.at[pl.ds(first, step * THREADS)], layout=strided(step))
