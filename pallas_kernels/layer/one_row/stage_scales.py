"""Scales and zero points of few-bit weights that change along the depth.

The producer copies the numbers of a stage into shared memory beside its blocks (``cp.async``, which
the stage's barrier counts as one more arrival). A copy has the four bytes around a number: threads
that use the number take it out of them.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.layer.one_row.sizes import TILE
from rjax.pallas_kernels.layer.one_row.smem_row import GROUP
from rjax.pallas_kernels.layer.one_row.threads import equal, load, select, shared_address
from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    add,
    address,
    div,
    i32,
    i32_type,
    mul,
    rem,
    thread_index,
)
from rjax.pallas_kernels.mosaic.tma_copy import last_copy_barrier

STAGE_COLUMNS = 2 * TILE
"""Columns of the two blocks of a stage."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageScales:
    """Where the scales of a product's weights are.

    Attributes:
        refs: GMEM, [X / outputs, E / inputs] with the columns X of all matrices: the scales
            (float), and perhaps the zero points (int8).
        block: (outputs, inputs) that share a scale; inputs are a multiple of `GROUP`.
        parts: groups of a block, 1 or 2.
    """

    refs: tuple[Any, ...]
    block: tuple[int, int]
    parts: int

    def copy(self, words, *, columns, depth) -> None:
        """Start to copy the scales and zero points of a stage, by all threads of the producer.

        words: float32 [kinds * parts, `STAGE_COLUMNS`] SMEM, the stage's words. columns: int32,
        first column of each block. depth: int32, first input of both.
        """
        references = [plgpu.RefType()] * (1 + len(self.refs))

        @plgpu.inline_mgpu(arg_types=(*references, *[SCALAR] * 3))
        def emit(_, words, *rest):
            refs = rest[: len(self.refs)]
            *firsts, depth = (x.registers.item() for x in rest[len(self.refs) :])
            column = select(equal(div(thread_index(), TILE), 0), *firsts)
            column = arith.addi(column, rem(thread_index(), TILE))
            target = arith.addi(shared_address(words), mul(thread_index(), 4))
            for kind, ref in enumerate(refs):
                for part in range(self.parts):
                    element = self._element(ref, column, depth, i32(part))
                    word = arith.andi(mul(element, _bits(ref) // 8), i32(-4))
                    at = add(target, 4 * STAGE_COLUMNS * (kind * self.parts + part))
                    _copy_word(at, address(ref, word))

        emit(words, *self.refs, *columns, depth)

    def numbers(self, words, refs, column, place, depth, part) -> tuple[Any, Any]:
        """(float32 scale, int32 zero point or None) of a column; inside emitted code.

        words, refs: the memrefs of the stage's words and of ``refs``. column, place: int32, the
        column and its index in the stage. depth: int32, first input of the stage. part: int32.
        """
        part = part if self.parts > 1 else i32(0)
        found = []
        for kind, ref in enumerate(refs):
            [word] = load(words, [add(part, kind * self.parts), place], 1)
            element = self._element(ref, column, depth, part)
            found.append(_taken(arith.bitcast(i32_type(), word), element, ref))
        return found[0], found[1] if len(found) == 2 else None

    def _element(self, ref, column, depth, part):
        """int32 index in the flat array, of group ``part`` of a block; all int32."""
        outputs, inputs = self.block
        _, groups = ref.type.shape
        group = div(arith.addi(depth, mul(part, GROUP)), inputs)
        return arith.addi(mul(div(column, outputs), groups), group)


def _bits(ref) -> int:
    return mgpu.utils.bitwidth(ir.MemRefType(ref.type).element_type)


def _taken(word, element, ref):
    """The number whose index is ``element``, out of the four bytes around it."""
    kind, bits = ir.MemRefType(ref.type).element_type, _bits(ref)
    if bits == 32:
        return arith.bitcast(kind, word)
    before = mul(rem(element, 32 // bits), bits)
    if bits == 8:
        moved = arith.shli(word, arith.subi(i32(24), before))
        return arith.shrsi(moved, i32(24))
    half = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(word, before))
    return arith.extf(ir.F32Type.get(), arith.bitcast(kind, half))


def _copy_word(target, source) -> None:
    """Copy four bytes from GMEM (int64 address) to SMEM (int32 address), asynchronously."""
    form = "cp.async.ca.shared.global [$0], [$1], 4;"
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [target, source], form, "r,l,~{memory}", has_side_effects=True)


def arrive_after_copies() -> None:
    """Each thread arrives at the barrier of the last ``copy_gmem_to_smem`` once its copies have."""
    form = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"

    @plgpu.inline_mgpu(arg_types=())
    def emit(_):
        barrier, nothing = last_copy_barrier(), ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, [barrier], form, "r,~{memory}", has_side_effects=True)

    emit()
