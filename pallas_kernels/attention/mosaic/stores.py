"""Register-level reads and writes that Pallas has no primitive for: rows scattered by a table."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from pallas_kernels.attention.mosaic import quads
from pallas_kernels.attention.mosaic.config import ROWS
from pallas_kernels.mosaic_emit import GLOBAL

_SCALAR = plgpu.Layout.WG_SPLAT(())
_VECTOR = plgpu.Layout.WGMMA.reduce(1)


def gather_rows(table, base, live, group: int):
    """``table[base + min(m // group, live - 1)]`` for the 64 rows m of a tile.

    table: int32 in GMEM, one dimension; base, live: int32 scalars, live >= 1.
    Returns int32 [64], one value a matrix row.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=_VECTOR),
    )
    def gather(_, ref, base_, live_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [start], [rows] = base_.registers.flat, live_.registers.flat
        last = arith.subi(rows, mgpu.c(1, i32))

        def element(m):
            row = arith.divui(arith.index_cast(i32, m), mgpu.c(group, i32))
            row = arith.addi(start, arith.minsi(row, last))
            return memref.load(ref, [arith.index_cast(index, row)])

        return mgpu.FragmentedArray.build((ROWS,), _VECTOR.to_mgpu(), element, is_signed=True)

    return gather(table, base, live)


def store_rows(out, part, value, dest, row0, head0, live, group: int):
    """Write the live rows of a [64, H] tile: row m is head ``head0 + m % group`` of row m // group.

    out: [T, N, H] and part: [X, N, H] in GMEM, value's dtype; dest: int32 [64], the merge entry, or
    -1 to write ``out[row0 + m // group]``; rows m >= live * group are dropped. H is a multiple of
    16.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            plgpu.Layout.WGMMA,
            _VECTOR,
            _SCALAR,
            _SCALAR,
            _SCALAR,
        ),
    )
    def store(_, out_, part_, value_, dest_, row_, head_, live_):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        targets = _Targets(dest_, row_, head_, live_, group)
        N, H = ir.MemRefType(out_.type).shape[1:]
        for which in range(2):
            words = [mgpu.utils.bitcast(r, i32) for _, r in quads.registers_of(value_, which)]
            parts = [
                (quads.column_of(first, runs), quads.exchange(words[first : first + runs]))
                for first, runs in quads.blocks(len(words))
            ]
            head, target, direct, alive = targets.of(which)
            head, target = (arith.index_cast(i64, x) for x in (head, target))
            row = arith.addi(arith.muli(target, mgpu.c(N, i64)), head)
            element = arith.muli(row, mgpu.c(H, i64))
            start = arith.select(
                direct, quads.address_of(out_, element), quads.address_of(part_, element)
            )
            with mgpu.when(alive):
                for column, some in parts:
                    offset = arith.extui(i64, arith.muli(column, mgpu.c(2, i32)))
                    quads.write(arith.addi(start, offset), some, GLOBAL)

    store(out, part, value, dest, row0, head0, live)


def store_row_scalars(out, part, value, dest, row0, head0, live, group: int):
    """The same for one float32 number a row: out [T, N], part [X, N], value [64]."""

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(),
            _VECTOR,
            _VECTOR,
            _SCALAR,
            _SCALAR,
            _SCALAR,
        ),
    )
    def store(_, out_, part_, value_, dest_, row_, head_, live_):
        targets = _Targets(dest_, row_, head_, live_, group)
        for which, register in enumerate(value_.registers.flat):
            if isinstance(register.type, ir.VectorType):
                register = vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([0]),
                )
            head, target, direct, alive = targets.of(which)
            with mgpu.when(alive):
                branch = scf.IfOp(direct, has_else=True)
                for block, ref in ((branch.then_block, out_), (branch.else_block, part_)):
                    with ir.InsertionPoint(block):
                        memref.store(register, ref, [target, head])
                        scf.yield_([])

    store(out, part, value, dest, row0, head0, live)


class _Targets:
    """Where this thread's rows go; ``of(which)`` for its first (0) or second (1) row."""

    def __init__(self, dest, row0, head0, live, group: int):
        self._dest = list(dest.registers.flat)
        self._rows = [m for (m,) in dest.layout.thread_idxs(dest.shape)]
        assert len(self._dest) == 2
        [self._row0], [self._head0], [self._live] = (x.registers.flat for x in (row0, head0, live))
        self._group = group

    def of(self, which: int):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        m = arith.index_cast(i32, self._rows[which])
        row = arith.divui(m, mgpu.c(self._group, i32))
        head = arith.addi(self._head0, arith.remui(m, mgpu.c(self._group, i32)))
        entry = self._dest[which]
        if isinstance(entry.type, ir.VectorType):
            entry = vector.extract(
                entry, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
            )
        direct = arith.cmpi(arith.CmpIPredicate.slt, entry, mgpu.c(0, i32))
        target = arith.select(direct, arith.addi(self._row0, row), entry)
        alive = arith.cmpi(arith.CmpIPredicate.slt, row, self._live)
        return arith.index_cast(index, head), arith.index_cast(index, target), direct, alive
