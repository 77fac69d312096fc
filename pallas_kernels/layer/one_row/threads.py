"""What the consumer threads of a CTA emit: loads, sums over threads, words.

256 threads work as one group. Blocks of 64 x 64 lie in shared memory as TMA writes them with
swizzled lines of 128 bytes: run c of 8 columns of row r is at place c ^ (r % 8).
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

from typing import Any

import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as mlir_math

from rjax.pallas_kernels.layer.one_row.sizes import TILE
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
)
from rjax.pallas_kernels.mosaic.words import load_vector, poll_words, store_vector, store_words

CONSUMERS = 256
WARPS = 8
BLOCK_ROWS = 2  # of a block of 64 rows, of one thread
CHUNK = 8  # columns of a thread
LOG2_E = 1.4426950408889634
_WARP = 32
_TILE_ROWS = 8
LINE_BYTES = 128
"""Bytes of a row of a block in shared memory."""
_BARRIER = 9  # of the hardware's 16; Pallas uses the first few


BLOCK_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
"""Tiling and swizzle transforms of a block in shared memory."""


def simt(function, refs, scalars=(), states=(), returns: tuple[int, ...] = (), blocks=()) -> Any:
    """Emit ``function(*blocks, *refs, *scalars, *states)``.

    refs: GMEM or SMEM. scalars: int32. states: arrays in `state_layout`, passed as lists of lists
    of 8 float32 values. returns: registers of each state that the function returns. blocks: SMEM,
    with `BLOCK_TRANSFORMS`.
    """
    refs = (*blocks, *refs)
    types = (
        *(plgpu.RefType(BLOCK_TRANSFORMS) for _ in blocks),
        *(plgpu.RefType() for _ in refs[len(blocks) :]),
        *(SCALAR for _ in scalars),
        *(state_layout(state.size // STATE) for state in states),
    )
    shapes = tuple(
        plgpu.ShapeDtypeStruct((STATE * n,), jnp.float32, layout=state_layout(n)) for n in returns
    )

    @plgpu.inline_mgpu(arg_types=types, return_type=shapes or None)
    def run(_, *given):
        inputs = given[: len(refs)]
        numbers = [x.registers.flat[0] for x in given[len(refs) : len(refs) + len(scalars)]]
        old = [[_elements(r) for r in x.registers.flat] for x in given[len(refs) + len(scalars) :]]
        found = function(*inputs, *numbers, *old)
        return tuple(_state(new) for new in found) if returns else None

    return run(*refs, *scalars, *states)


STATE = CHUNK * THREADS  # numbers of a warpgroup, 8 a thread


def state_layout(registers: int):
    """Layout of a state that a loop carries: 8 float32 numbers a thread and register."""
    return plgpu.Layout.WG_STRIDED((STATE * registers,), vec_size=CHUNK)


def filled(registers: int, value: float):
    """A state whose numbers are all ``value``."""
    [state] = simt(lambda: [[[f32(value)] * CHUNK] * registers], (), returns=(registers,))
    return state


def _state(registers):
    vectors = np.empty(len(registers), object)
    kind = ir.VectorType.get((CHUNK,), ir.F32Type.get())
    vectors[:] = [vector.from_elements(kind, numbers) for numbers in registers]
    layout = state_layout(len(registers)).to_mgpu()
    shape = layout.registers_shape((STATE * len(registers),))
    return mgpu.FragmentedArray(_registers=vectors.reshape(shape), _layout=layout, _is_signed=None)


def _elements(register):
    [size] = register.type.shape
    return [vector.extract(register, [], [i]) for i in range(size)]


def f32(value: float):
    """A float32 constant."""
    return mgpu.c(float(value), ir.F32Type.get())


def thread():
    """int32 index of a consumer thread; consumers are the first warpgroups."""
    return mgpu.utils.thread_idx()


def lane():
    """int32 index of the thread in its warp."""
    return rem(thread(), _WARP)


def warp():
    """int32 index of the warp."""
    return div(thread(), _WARP)


def barrier() -> None:
    """Wait for all consumer threads; what they stored in SMEM is then visible to each.

    Marked convergent: otherwise LLVM may copy it into both branches of a condition before it, and
    threads of one warp would wait at different instructions.
    """
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [],
        f"bar.sync {_BARRIER}, {CONSUMERS};",
        "~{memory}",
        has_side_effects=True,
        convergent=True,
    )


def prefetch(ref, *at):
    """Start to load an int32 from GMEM; `await_prefetch` waits for it.

    ptxas waits early for numbers that all threads share, to move them to other registers. The place
    has a zero that differs between threads as far as it sees: the count of a number's bits, / 64.
    """
    one = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * len(at)), return_type=one)
    def run(_, ref, *at):
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        bits = llvm.inline_asm(i32_type(), [thread()], "popc.b32 $0, $1;", "=r,r")
        place = arith.shrui(bits, i32(6))
        for number, stride in zip(at, strides, strict=True):
            place = arith.addi(place, mul(number.registers.item(), stride))
        [word] = load_vector("ld.global", address(ref, mul(place, 4)), 1)
        return _number(word)

    return run(ref, *(jnp.int32(number) for number in at))


def await_prefetch(value):
    """The int32 of `prefetch`, as a number that the threads of a warp share."""
    one = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=one)
    def run(_, value):
        form = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        options = {"has_side_effects": True, "convergent": True}
        word = value.registers.item()
        return _number(llvm.inline_asm(i32_type(), [word], form, "=r,r", **options))

    return run(value)


def _number(word):
    return mgpu.FragmentedArray.splat(word, (), SCALAR.to_mgpu(), is_signed=True)


def index(value):
    """int32 to the type of indices."""
    return arith.index_cast(ir.IndexType.get(), i32(value))


def below(a, b):
    """Whether int32 a < b."""
    return arith.cmpi(arith.CmpIPredicate.slt, a, i32(b))


def equal(a, b):
    """Whether int32 a == b."""
    return arith.cmpi(arith.CmpIPredicate.eq, a, i32(b))


def select(condition, a, b):
    """a where the condition holds, else b."""
    return arith.select(condition, a, b)


def fma(a, b, c):
    """a * b + c, rounded once."""
    return mlir_math.fma(a, b, c)


def exp2(value):
    """2 ** value, to 2 units in the last place."""
    return llvm.inline_asm(
        ir.F32Type.get(), [value], "ex2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False
    )


def rounded(value):
    """float32 rounded to bfloat16."""
    return arith.extf(value.type, arith.truncf(ir.BF16Type.get(), value))


def across(value, distances, combine):
    """``combine`` over the lanes whose index differs in these bits."""
    for distance in distances:
        value = combine(value, mgpu.utils.shfl_bfly(value, distance))
    return value


def quotient(a, b):
    """a / b, to 2 units in the last place."""
    return llvm.inline_asm(
        ir.F32Type.get(), [a, b], "div.full.ftz.f32 $0, $1, $2;", "=f,f,f", has_side_effects=False
    )


def load(ref, indices, size: int) -> list[Any]:
    """``size`` neighbours of a ref of float32 or bfloat16, as float32; GMEM, or SMEM of float32."""
    if mgpu.utils.is_smem_ref(ref):
        words = _load_shared(*_shared_place(ref, indices), size)
        return [arith.bitcast(ir.F32Type.get(), word) for word in words]
    element = ref.type.element_type
    at = [index(i) for i in indices]
    nbytes = size * mgpu.utils.bitwidth(element) // 8
    if isinstance(element, ir.F32Type):
        kind = ir.VectorType.get((size,), element)
        return _elements(vector.load(kind, ref, at, alignment=min(nbytes, 16)))
    values = vector.load(ir.VectorType.get((size,), element), ref, at, alignment=nbytes)
    if size == 1:
        return [arith.extf(ir.F32Type.get(), x) for x in _elements(values)]
    pairs = vector.bitcast(ir.VectorType.get((size // 2,), i32_type()), values)
    return [number for pair in _elements(pairs) for number in _halves(pair)]


def store(ref, indices, values) -> None:
    """Neighbours of a ref of float32 or 16-bit floats; to SMEM up to 16 bytes, 16-bit in pairs."""
    element = ref.type.element_type
    if mgpu.utils.is_smem_ref(ref):
        if isinstance(element, ir.F32Type):
            words = [arith.bitcast(i32_type(), value) for value in values]
        else:
            kind = "f16x2" if isinstance(element, ir.F16Type) else "bf16x2"
            pairs = zip(values[::2], values[1::2], strict=True)
            words = [_pair(low, high, kind) for low, high in pairs]
        at, constant = _shared_place(ref, indices)
        store_vector("st.shared", at, words, constant)
        return
    if not isinstance(element, ir.F32Type):
        values = [arith.truncf(element, value) for value in values]
    kind = ir.VectorType.get((len(values),), element)
    nbytes = len(values) * mgpu.utils.bitwidth(element) // 8
    at = [index(i) for i in indices]
    vector.store(vector.from_elements(kind, values), ref, at, alignment=min(nbytes, 16))


def _halves(pair):
    """Two bfloat16 in an int32, as float32: a bfloat16 is the high half of a float32."""
    halves = arith.shli(pair, i32(16)), arith.andi(pair, i32(-65536))
    return [arith.bitcast(ir.F32Type.get(), half) for half in halves]


def _pair(low, high, kind: str):
    form = f"cvt.rn.{kind}.f32 $0, $1, $2;"
    return llvm.inline_asm(i32_type(), [high, low], form, "=r,f,f", has_side_effects=False)


def _shared_place(ref, indices) -> tuple[Any, int]:
    """(int32 address, constant bytes behind it) in SMEM, in as few instructions as possible."""
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    address, constant = shared_address(ref), 0
    itemsize = mgpu.utils.bitwidth(ref.type.element_type) // 8
    for at, stride in zip(indices, strides, strict=True):
        if isinstance(at, int):
            constant += at * stride * itemsize
        else:
            address = arith.addi(address, mul(at, stride * itemsize))
    return address, constant


def _load_shared(address, constant: int, size: int) -> list[Any]:
    """int32 words of SMEM; up to 16 bytes by one load."""
    if size > 4:
        return _load_shared(address, constant, 4) + _load_shared(address, constant + 16, size - 4)
    return load_vector("ld.shared", address, size, constant)


def take(words, *groups: tuple[list[Any], int]) -> list[list[Any]]:
    """The numbers of each vector, as soon as all have arrived.

    groups: first words (int32) of vectors, and their size.
    """
    vectors = [(_word(words, at), size) for firsts, size in groups for at in firsts]
    found = iter(poll_words(vectors, "gpu"))
    return [[arith.bitcast(ir.F32Type.get(), next(found)) for _ in range(n)] for _, n in vectors]


def send(words, first, values) -> None:
    """Store float32 numbers as words from ``first`` (int32) on."""
    zero = f32(0)
    bits = []
    for value in values:  # -0.0 is an empty word
        is_zero = arith.cmpf(arith.CmpFPredicate.OEQ, value, zero)
        bits.append(arith.bitcast(i32_type(), select(is_zero, zero, value)))
    store_words(_word(words, first), bits, "relaxed.gpu.")


def _word(words, at):
    return address(words, mul(at, 4))


def total(value, scratch):
    """The sum of a float32 over all consumer threads; scratch: SMEM, float32 [WARPS]."""
    value = across(value, (16, 8, 4, 2, 1), arith.addf)
    with mgpu.when(equal(lane(), 0)):
        store(scratch, [warp()], [value])
    barrier()
    values = load(scratch, [0], 4) + load(scratch, [4], 4)
    found = values[0]
    for other in values[1:]:
        found = arith.addf(found, other)
    return found


def block_place():
    """(rows, first column) of a thread in a block: 8 columns of two rows."""
    row = div(thread(), CHUNK)
    rows = [add(row, i * (CONSUMERS // CHUNK)) for i in range(BLOCK_ROWS)]
    return rows, mul(rem(thread(), CHUNK), CHUNK)


def load_block(blocks, block: int, row, column) -> list[Any]:
    """8 columns of a row of a block, as float32; blocks: bfloat16 [2, 64, 64] SMEM, tiled."""
    run = arith.xori(div(column, CHUNK), rem(row, _TILE_ROWS))
    address = arith.addi(shared_address(blocks), mul(row, LINE_BYTES))
    address = arith.addi(address, mul(run, 16))
    pairs = _load_shared(address, block * TILE * LINE_BYTES, 4)
    return [number for pair in pairs for number in _halves(pair)]


def shared_address(ref):
    """int32 address of a ref in SMEM."""
    return llvm.ptrtoint(i32_type(), mgpu.utils.memref_ptr(ref))
