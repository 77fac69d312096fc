"""The epilogue: results of a work tile from registers to GMEM, rows scattered by a table.

A row whose only result this is goes to (out, lse); the result of a row with several goes to a merge
entry of (partial_out, partial_lse), which relay fusion reads. Rows beyond the live ones are
dropped. Bytes: 2 * H + 4 a live row and head. The multi-row path writes 16 bytes a thread
(``fragments``). Swap-AB decode writes number by number, because neighbours of a head dim are in
eight threads; that is one row a work tile.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from rjax.pallas_kernels.attention.mosaic.cta import Results
from rjax.pallas_kernels.attention.mosaic.fragments import (
    COLUMNS,
    ROWS,
    block_column,
    element_address,
    exchange,
    exchange_blocks,
    extract,
    row_registers,
    run_indices,
    store_number,
    write_words,
)
from rjax.pallas_kernels.mosaic.emit import (
    GLOBAL,
    SCALAR,
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


class OutputRows(NamedTuple):
    """Destinations of 64 matrix rows. Matrix row m is head ``head + m % G`` of row m // G.

    entry: int32 [64], the merge entry, or -1 to write row ``row + m // G`` of the output. row,
    head: int32, the row and head of matrix row 0. live: int32, rows to write. dim: int32, where in
    a head the values begin.
    """

    entry: Any
    row: Any
    head: Any
    live: Any
    dim: Any


class OutputRow(NamedTuple):
    """Destination of one row's G heads, from ``head`` on; all int32 scalars.

    entry: the merge entry, or -1 to write row ``row`` of the output. live: 0 to write nothing. dim:
    where in a head the values begin. stores_lse: 0 to write values only.
    """

    entry: Any
    row: Any
    head: Any
    live: Any
    dim: Any
    stores_lse: Any


_ROWS_TYPE = OutputRows(ROWS, *[SCALAR] * 4)
_ROW_TYPE = OutputRow(*[SCALAR] * 6)
_RESULTS_TYPE = Results(*(plgpu.RefType() for _ in Results._fields))


def store_rows(results: Results, value, rows: OutputRows, group: int) -> None:
    """Write the live rows of a tile; value: 16-bit [64, H] in registers, H a multiple of 16."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _WGMMA, _ROWS_TYPE))
    def store(_, out_, partial_, value_, rows_):
        i64 = ir.IntegerType.get_signless(64)
        targets = _ThreadRows(rows_, group)
        N, H = ir.MemRefType(out_.type).shape[1:]
        [dim] = rows_.dim.registers.flat
        first_dim = arith.extsi(i64, dim)
        for which in range(2):
            words = [mgpu.utils.bitcast(r, i32_type()) for _, r in row_registers(value_, which)]
            parts = [
                (
                    block_column(first, runs),
                    exchange(words[first : first + runs]),
                )
                for first, runs in exchange_blocks(len(words))
            ]
            head, target, direct, live = targets.of(which)
            head, target = (arith.index_cast(i64, x) for x in (head, target))
            row = arith.addi(arith.muli(target, mgpu.c(N, i64)), head)
            element = arith.addi(arith.muli(row, mgpu.c(H, i64)), first_dim)
            start = arith.select(
                direct,
                element_address(out_, element),
                element_address(partial_, element),
            )
            with mgpu.when(live):
                for column, block in parts:
                    offset = arith.extui(i64, mul(column, 2))
                    write_words(arith.addi(start, offset), block, GLOBAL)

    store(results.out, results.partial_out, value, rows)


def store_lse(results: Results, value, rows: OutputRows, group: int) -> None:
    """Write the LSE of the live rows; value: float32 [64] in registers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), ROWS, _ROWS_TYPE))
    def store(_, out_, partial_, value_, rows_):
        targets = _ThreadRows(rows_, group)
        for which, register in enumerate(value_.registers.flat):
            if isinstance(register.type, ir.VectorType):
                register = extract(register, 0)
            head, target, direct, live = targets.of(which)
            with mgpu.when(live):
                branch = scf.IfOp(direct, has_else=True)
                for block, ref in ((branch.then_block, out_), (branch.else_block, partial_)):
                    with ir.InsertionPoint(block):
                        memref.store(register, ref, [target, head])
                        scf.yield_([])

    store(results.lse, results.partial_lse, value, rows)


class _ThreadRows:
    """Destinations of this thread's two rows."""

    def __init__(self, rows: OutputRows, group: int):
        self._entry = list(rows.entry.registers.flat)
        self._matrix_rows = [m for (m,) in rows.entry.layout.thread_idxs(rows.entry.shape)]
        assert len(self._entry) == 2
        [self._row0], [self._head0], [self._live] = (
            x.registers.flat for x in (rows.row, rows.head, rows.live)
        )
        self._group = group

    def of(self, which: int):
        """(head, row or merge entry, whether it is a row of the output, whether to write it)."""
        index = ir.IndexType.get()
        m = arith.index_cast(i32_type(), self._matrix_rows[which])
        row = div(m, self._group)
        head = arith.addi(self._head0, rem(m, self._group))
        entry = self._entry[which]
        if isinstance(entry.type, ir.VectorType):
            entry = extract(entry, 0)
        direct = arith.cmpi(arith.CmpIPredicate.slt, entry, i32(0))
        target = arith.select(direct, arith.addi(self._row0, row), entry)
        live = arith.cmpi(arith.CmpIPredicate.slt, row, self._live)
        return arith.index_cast(index, head), arith.index_cast(index, target), direct, live


def store_swap_ab(results: Results, value, lse, row: OutputRow, group: int) -> None:
    """Write one row's G heads; value: 16-bit [W, C], lse: float32 [C], in registers."""
    C = value.shape[1]

    @plgpu.inline_mgpu(arg_types=(_RESULTS_TYPE, _WGMMA, COLUMNS, _ROW_TYPE))
    def store(_, results_, value_, lse_, row_):
        H = ir.MemRefType(results_.out.type).shape[2]
        i64 = ir.IntegerType.get_signless(64)
        values, scalars, live = _row_addresses(results_, row_)
        lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
        live = arith.cmpi(arith.CmpIPredicate.ne, live, i32(0))
        [first_dim], [lse_too] = row_.dim.registers.flat, row_.stores_lse.registers.flat
        lse_stop = arith.muli(lse_too, i32(4))  # the first four threads hold all columns
        for run in range(C // 8):
            for n in range(2):
                column = add(mul(rem(lane, 4), 2), 8 * run + n)
                is_head = arith.cmpi(arith.CmpIPredicate.ult, column, i32(group))
                with mgpu.when(arith.andi(live, is_head)):
                    for at in run_indices(value_, run):
                        dim = arith.addi(first_dim, add(mul(warp, 16), 64 * at[0] + 8 * at[4]))
                        number = arith.addi(mul(column, H), arith.addi(dim, div(lane, 4)))
                        place = arith.addi(values, arith.extui(i64, mul(number, 2)))
                        store_number(pointer(place, GLOBAL), extract(value_.registers[at], n))
                    has_lse = arith.cmpi(arith.CmpIPredicate.ult, thread_index(), lse_stop)
                    with mgpu.when(has_lse):
                        place = arith.addi(scalars, arith.extui(i64, mul(column, 4)))
                        pair = lse_.registers.flat[run]
                        store_number(pointer(place, GLOBAL), extract(pair, n))

    store(results, value, lse, row)


def _row_addresses(results: Results, row: OutputRow):
    """int64 addresses of the row's first value and first LSE, and its ``live``."""
    [entry], [index] = row.entry.registers.flat, row.row.registers.flat
    [head], [live] = row.head.registers.flat, row.live.registers.flat
    N, H = ir.MemRefType(results.out.type).shape[1:]
    direct = arith.cmpi(arith.CmpIPredicate.slt, entry, i32(0))
    i64 = ir.IntegerType.get_signless(64)
    first = arith.addi(
        arith.muli(arith.extsi(i64, arith.select(direct, index, entry)), mgpu.c(N, i64)),
        arith.extsi(i64, head),
    )
    values = arith.select(
        direct, address(results.out, i32(0)), address(results.partial_out, i32(0))
    )
    values = arith.addi(values, arith.muli(first, mgpu.c(2 * H, i64)))
    scalars = arith.select(
        direct, address(results.lse, i32(0)), address(results.partial_lse, i32(0))
    )
    return values, arith.addi(scalars, arith.muli(first, mgpu.c(4, i64))), live
