"""Register-level reads and writes that Pallas has no primitive for: rows scattered by a table."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from pallas_kernels.attention.mosaic.config import ROWS

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
    -1 to write ``out[row0 + m // group]``; rows m >= live * group are dropped.
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
        shape = value_.shape
        targets = _Targets(dest_, row_, head_, live_, group)
        registers = list(zip(value_.layout.thread_idxs(shape), value_.registers.flat, strict=True))
        # A thread holds two rows, r and r + 8, two columns in each run of 8.
        for which in range(2):
            mine = _pick_row(registers, value_.registers.shape, which)
            head, target, direct, alive = targets.of(which)
            with mgpu.when(alive):
                branch = scf.IfOp(direct, has_else=True)
                for block, ref in ((branch.then_block, out_), (branch.else_block, part_)):
                    with ir.InsertionPoint(block):
                        for (_, column), register in mine:
                            vector.store(register, ref, [target, head, column])
                        scf.yield_([])

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


def _pick_row(registers, shape, which: int):
    """The registers of one of a thread's two rows: axis 4 of the WGMMA layout's register grid."""
    assert shape[4] == 2 and len(shape) == 9, shape
    places = np.ndindex(shape)
    return [reg for place, reg in zip(places, registers, strict=True) if place[4] == which]
