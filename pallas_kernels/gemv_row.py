"""The input row of a GEMV, computed by every CTA while its first weights are loaded.

The residual sum and norm of one row, or the merge of its partial attention results, read so few
bytes that every CTA of the following GEMV can repeat them. That saves a kernel launch, and device
memory keeps streaming weights. With more rows, every CTA would read too much.

The row lies in shared memory in wgmma layout, one row in each group of eight. The other seven hold
stale data; their results are dropped.
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

from pallas_kernels.mosaic_emit import SCALAR, THREADS, store_strided, thread_index, widest_vector
from pallas_kernels.partial import Partial
from pallas_kernels.relay_fusion.mosaic import merge_entries
from pallas_kernels.unmerged_attention import UnmergedAttention

MOST_COLUMNS = 5120
"""Columns of the row that a program takes at most: they fill memory that weights want."""

GROUP = 8  # rows of shared memory that one row takes
DEPTH_UNIT = 128  # depths are multiples of it
_CHUNK = 64  # columns of a group


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Where a program's run of the row goes.

    Attributes:
        ref: [GROUP * groups and more, 64] SMEM, as the tensor cores read it.
        transforms: of ref.
        start, columns: of the row that the program wants, int32; multiples of 64.
        room: the most columns that any program wants.
        depth: columns of the row.
    """

    ref: Any
    transforms: tuple[Any, ...]
    start: Any
    columns: Any
    room: int
    depth: int

    def pieces(self) -> tuple[int, list[Any]]:
        """(numbers a thread, first columns) of pieces of 128 times so many that hold the run."""
        step = next(s for s in (8, 4, 2, 1) if _whole(self.room, s * THREADS) <= self.depth)
        size = step * THREADS
        count = _whole(self.room, size) // size
        first = jnp.minimum(self.start, self.depth - count * size)
        return step, [pl.multiple_of(first + i * size, _CHUNK) for i in range(count)]

    def put(self, value, first, layout) -> None:
        """Those of ``value``'s numbers that the program wants; value: 16-bit [X] from column
        ``first`` (int32) on, in a WG_STRIDED layout."""
        arguments = (
            plgpu.RefType(self.transforms),
            layout,
            *(SCALAR for _ in range(3)),
        )

        @plgpu.inline_mgpu(arg_types=arguments)
        def store(_, line_, value_, first_, start_, columns_):
            i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
            [first], [start], [columns] = (x.registers.flat for x in (first_, start_, columns_))
            offset, zero = arith.subi(first, start), mgpu.c(0, index)
            for i, register in enumerate(value_.registers.flat):
                [run] = register.type.shape
                own = arith.addi(
                    arith.muli(thread_index(), mgpu.c(run, i32)), mgpu.c(i * THREADS * run, i32)
                )
                column = arith.addi(offset, own)
                # Columns before the run are large numbers without a sign.
                inside = arith.cmpi(arith.CmpIPredicate.ult, column, columns)
                with mgpu.when(inside):
                    group, place = (
                        arith.index_cast(index, do(column, mgpu.c(_CHUNK, i32)))
                        for do in (arith.divui, arith.remui)
                    )
                    vector.store(register, line_, [group, zero, zero, place], alignment=2 * run)

        store(self.ref, value, first, self.start, self.columns)


class RowSource(abc.ABC):
    """What makes the row; a product takes it in place of rows, and has its shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(1, D)."""
        return self.row.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of 16 bits."""
        return self.row.dtype

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[Array, ...]:
        """What the kernel reads."""

    @property
    @abc.abstractmethod
    def row(self) -> jax.ShapeDtypeStruct:
        """[1, D]: its depth and dtype."""

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What the kernel writes beside the product."""
        return ()

    @abc.abstractmethod
    def fill(self, refs, results, line: Line, scratch, is_first) -> None:
        """Put the run of the row into ``line``, by one warpgroup.

        refs, results: GMEM, of ``operands`` and ``results``. scratch: float32 [4] SMEM. is_first:
        bool, whether this program writes the results.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class GivenRow(RowSource):
    """A row that is there."""

    h: Float[Array, "1 D"]

    @property
    def operands(self) -> tuple[Array, ...]:
        return (self.h,)

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.h.shape, self.h.dtype)

    def fill(self, refs, results, line: Line, scratch, is_first) -> None:
        del results, scratch, is_first
        [h] = refs
        step, firsts = line.pieces()
        layout = _strided(step)
        values = [_read(h.at[0], first, step) for first in firsts]
        for value, first in zip(values, firsts, strict=True):
            line.put(value, first, layout)


@dataclasses.dataclass(frozen=True, slots=True)
class MergedRow(RowSource):
    """A row's attention, merged from its partial results."""

    attention: UnmergedAttention

    @property
    def operands(self) -> tuple[Array, ...]:
        given = self.attention
        flat = (given.out.reshape(1, -1), given.part.reshape(len(given.part), -1))
        return (*flat, given.part_lse, given.merge_indptr)

    @property
    def row(self) -> jax.ShapeDtypeStruct:
        _, N, H = self.attention.shape
        return jax.ShapeDtypeStruct((1, N * H), self.attention.out.dtype)

    def fill(self, refs, results, line: Line, scratch, is_first) -> None:
        del results, scratch, is_first
        out, parts, lses, indptr = refs
        H, dtype = self.attention.shape[2], self.attention.out.dtype
        step, firsts = line.pieces()
        layout = _strided(step)
        begin, end = indptr[0], indptr[1]
        for first in firsts:

            def put(merged, _, first=first):
                line.put(merged.astype(dtype), first, layout)

            @pl.when(end - begin == 1)
            def _(first=first):
                line.put(_read(out.at[0], first, step), first, layout)

            @pl.when(end - begin != 1)
            def _(first=first, put=put):
                merge_entries(parts, lses, begin, end, first, step, H, put)


@dataclasses.dataclass(frozen=True, slots=True)
class NormedRow(RowSource):
    """The RMSNorm of a residual sum, whose sum is a result too; as ``add_rms_norm`` with T = 1."""

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

    def fill(self, refs, results, line: Line, scratch, is_first) -> None:
        x, update, weight = refs
        [total_ref] = results
        D, dtype = line.depth, self.x.dtype
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
        total = (read(x.at[0]) + added).astype(dtype)
        pl.when(is_first)(lambda: store_strided(total_ref.at[0], total, layout))
        y = total.astype(jnp.float32)

        @plgpu.inline_mgpu(
            arg_types=(layout, plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
        )
        def add_up(_, numbers, scratch_):  # Pallas' sum is one of all warpgroups
            return numbers.reduce("add", 0, scratch_)

        mean = add_up(y * y, scratch) * (1.0 / D)
        normed = (y * lax.rsqrt(mean + self.eps) * scale).astype(dtype)
        line.put(normed, jnp.int32(0), layout)


def _whole(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _strided(step: int):
    return plgpu.Layout.WG_STRIDED((step * THREADS,), vec_size=step)


def _read(ref, first, step: int):
    return plgpu.load(ref.at[pl.ds(first, step * THREADS)], layout=_strided(step))
