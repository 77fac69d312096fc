"""Rows of one page between device memory and a tile in shared memory, for the chunk kernels.

The rows of a step start anywhere, so that no tiled TMA copy can read a page of them. 128 threads
move 16 bytes each at once; a tile is [64, X] with 8-row tiles of 64 columns and a 128-byte swizzle,
as wgmma reads it. Bytes moved: 128 * X a page, each once.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    add,
    address,
    div,
    i32,
    i32_type,
    mul,
    rem,
    thread_index,
)
from rjax.pallas_kernels.mosaic.words import load_vector, store_vector

PAGE_SIZE = 64
"""Tokens of a page."""

HEAD_DIM = 128
"""Length of a key and of a value."""

TILE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Transforms of a tile in shared memory."""

_VECTOR = 8  # 16-bit numbers that a thread moves at once
_ATOM_ROWS, _ATOM_BYTES = 8, 1024
_ATOM_VECTORS = 8  # vectors of a row in an atom


class PageRows(NamedTuple):
    """The tokens [start, stop) of a page: consecutive rows of the step from ``first_row`` on."""

    first_row: Any
    start: Any
    stop: Any


_PAGE_ROWS = PageRows(SCALAR, SCALAR, SCALAR)


def gather_rows(tile, rows, tail, page: PageRows) -> None:
    """Start to fill a tile with a page: ``tail`` before ``start``, rows up to ``stop``, 0 behind.

    tile: SMEM 16-bit [64, X] with the transforms TILE; rows: GMEM [T, X]; tail: GMEM [64, X], or
    None for zeros. The caller waits (`await_rows`) and commits shared memory.
    """
    tails = () if tail is None else (tail,)
    arguments = (plgpu.RefType(TILE), plgpu.RefType(), (plgpu.RefType(),) * len(tails), _PAGE_ROWS)

    @plgpu.inline_mgpu(arg_types=arguments)
    def gather(_, tile_, rows_, tails_, page_):
        T, columns = ir.MemRefType(rows_.type).shape
        first, start, stop = _registers(page_)
        for token, vector in _vectors(columns):
            new = _within(token, start, stop)
            row = add(arith.subi(token, start), first)
            row = arith.maxsi(arith.minsi(row, i32(T - 1)), i32(0))
            at, exists = _element(rows_, row, vector), new
            for tail_ in tails_:
                old = arith.cmpi(arith.CmpIPredicate.slt, token, start)
                at = arith.select(old, _element(tail_, token, vector), at)
                exists = arith.ori(old, new)
            size = arith.select(exists, i32(2 * _VECTOR), i32(0))
            _copy_async(_tile_address(tile_, token, vector, columns), at, size)

    gather(tile, rows, tails, page)


def await_rows() -> None:
    """Wait until the tiles that this thread fills by `gather_rows` have its part."""

    @plgpu.inline_mgpu(arg_types=())
    def wait(_):
        _emit("cp.async.wait_all;", [], "")

    wait()


def _copy_async(to, at, size) -> None:
    """Copy ``size`` bytes, 16 or 0, from GMEM (int64) to SMEM (int32); zeros up to 16 bytes."""
    form = f"cp.async.cg.shared.global [$0], [$1], {2 * _VECTOR}, $2;"
    _emit(form, [to, at, size], "r,l,r")


def _emit(instruction: str, operands, constraints: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, instruction, constraints, has_side_effects=True)


def store_rows(rows, tile, page: PageRows) -> None:
    """Store the tokens [start, stop) of a tile in rows from ``first_row`` on.

    rows: GMEM [T, X]; tile: SMEM 16-bit [64, X] with the transforms TILE.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILE), _PAGE_ROWS))
    def store(_, rows_, tile_, page_):
        columns = ir.MemRefType(rows_.type).shape[1]
        first, start, stop = _registers(page_)
        moves = []
        for token, vector in _vectors(columns):
            at = _tile_address(tile_, token, vector, columns)
            moves.append((token, vector, load_vector("ld.shared", at, 4)))
        for token, vector, words in moves:
            with mgpu.when(_within(token, start, stop)):
                row = add(arith.subi(token, start), first)
                store_vector("st.global", _element(rows_, row, vector), words)

    store(rows, tile, page)


def copy_rows(tail, rows, page: PageRows) -> None:
    """Copy the rows of the tokens [start, stop) to a tail.

    tail: GMEM 16-bit [64, X]; rows: GMEM of its dtype [T, X].
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _PAGE_ROWS))
    def copy(_, tail_, rows_, page_):
        columns = ir.MemRefType(rows_.type).shape[1]
        first, start, stop = _registers(page_)
        for token, vector in _vectors(columns):
            with mgpu.when(_within(token, start, stop)):
                row = add(arith.subi(token, start), first)
                words = load_vector("ld.global", _element(rows_, row, vector), 4)
                store_vector("st.global", _element(tail_, token, vector), words)

    copy(tail, rows, page)


def gather_gates(gates, decay, beta, tail, page: PageRows) -> None:
    """Fill ``gates`` with the log decays and betas of a page, as `gather_rows` fills a tile.

    gates: SMEM float32 [2, 64]; decay, beta: GMEM float32 [T]; tail: GMEM float32 [2, 64]. The
    caller synchronises the threads.
    """

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, _PAGE_ROWS))
    def gather(_, gates_, decay_, beta_, tail_, page_):
        _, start, stop = _registers(page_)
        token, place, row_address = _gate(decay_, beta_, page_)
        new, old = _within(token, start, stop), arith.cmpi(arith.CmpIPredicate.slt, token, start)
        at = arith.select(old, address(tail_, place), row_address)
        [word] = load_vector("ld.global", at, 1)
        word = arith.select(arith.ori(old, new), word, i32(0))
        store_vector("st.shared", _shared(gates_, place), [word])

    gather(gates, decay, beta, tail, page)


def copy_gates(tail, decay, beta, page: PageRows) -> None:
    """Copy the log decays and betas of the tokens [start, stop) to a tail; shapes as above."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, _PAGE_ROWS))
    def copy(_, tail_, decay_, beta_, page_):
        _, start, stop = _registers(page_)
        token, place, row_address = _gate(decay_, beta_, page_)
        with mgpu.when(_within(token, start, stop)):
            store_vector(
                "st.global", address(tail_, place), load_vector("ld.global", row_address, 1)
            )

    copy(tail, decay, beta, page)


def _gate(decay, beta, page):
    """(token, byte in [2, 64], address among the rows) of the gate that a thread moves."""
    first, start, _ = _registers(page)
    which, token = div(thread_index(), PAGE_SIZE), rem(thread_index(), PAGE_SIZE)
    [T] = ir.MemRefType(decay.type).shape
    row = add(arith.subi(token, start), first)
    row = arith.maxsi(arith.minsi(row, i32(T - 1)), i32(0))
    of_row = [address(ref, mul(row, 4 * _stride(ref, 0))) for ref in (decay, beta)]
    is_decay = arith.cmpi(arith.CmpIPredicate.eq, which, i32(0))
    return token, mul(thread_index(), 4), arith.select(is_decay, *of_row)


def clear_padding(out, sequence, first) -> None:
    """Zero the padding rows of ``out`` among [first, first + 64).

    out: GMEM 16-bit [T, X]; sequence: GMEM int32 [T], negative for padding.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def clear(_, out_, sequence_, first_):
        T, columns = ir.MemRefType(out_.type).shape
        [start] = first_.registers.flat
        parts = THREADS // PAGE_SIZE
        row = add(div(thread_index(), parts), start)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, i32(T))):
            [found] = load_vector("ld.global", address(sequence_, mul(row, 4)), 1)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, found, i32(0))):
                for i in range(columns // _VECTOR // parts):
                    vector = add(mul(rem(thread_index(), parts), columns // _VECTOR // parts), i)
                    store_vector("st.global", _element(out_, row, vector), [i32(0)] * 4)

    clear(out, sequence, first)


def _registers(values) -> list[Any]:
    return [x.registers.flat[0] for x in values]


def _within(token, start, stop):
    above = arith.cmpi(arith.CmpIPredicate.sge, token, start)
    return arith.andi(above, arith.cmpi(arith.CmpIPredicate.slt, token, stop))


def _vectors(columns: int):
    """(token, vector of its row) of each move of a thread; both int32."""
    in_row = columns // _VECTOR
    for i in range(PAGE_SIZE * in_row // THREADS):
        index = add(thread_index(), i * THREADS)
        yield div(index, in_row), rem(index, in_row)


def _stride(ref, axis: int) -> int:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return strides[axis]


def _element(ref, row, vector):
    """int64 address of a vector of a row of a GMEM ref, 16-bit [rows, X]."""
    i64 = ir.IntegerType.get_signless(64)
    line = arith.muli(arith.extsi(i64, row), mgpu.c(2 * _stride(ref, 0), i64))
    return address(ref, arith.addi(line, arith.extsi(i64, mul(vector, 2 * _VECTOR))))


def _tile_address(tile, token, vector, columns: int):
    """int32 address of a vector of a tile in shared memory."""
    across = columns // (_ATOM_VECTORS * _VECTOR)
    atom = add(mul(div(token, _ATOM_ROWS), across), div(vector, _ATOM_VECTORS))
    line = rem(token, _ATOM_ROWS)
    swizzled = arith.xori(rem(vector, _ATOM_VECTORS), line)
    return _shared(tile, add(mul(atom, _ATOM_BYTES), add(mul(line, 128), mul(swizzled, 16))))


def _shared(ref, byte):
    """int32 address of byte ``byte`` (int32) of a SMEM ref."""
    return arith.trunci(i32_type(), address(ref, byte))
