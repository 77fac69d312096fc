"""Counters in device memory at which the CTAs of a launch meet.

A warpgroup that has stored a result counts itself; who needs the result of all waits for their
number. Each counter is used once a launch, and the launch after empties it. Results are written by
stores of threads and read by loads or by TMA, so that both sides have a proxy fence.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxtyping import Array, Int32

from rjax.pallas_kernels.mosaic.emit import THREADS, address, i32, i32_type, thread_index
from rjax.pallas_kernels.mosaic.words import count_poll, load_vector, store_words

_PROXY_FENCE = "fence.proxy.async.global;"  # without .global it waits for all stores of the thread

COUNTERS = 8
"""Number of counters of a launch, at least as many as it has meetings."""


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class GridBarrier:
    """The counters of two launches, which take turns.

    Attributes:
        current: counters of the next launch, all 0.
        other: counters of the launch before, which the next one empties.
    """

    current: Int32[Array, " X"]
    other: Int32[Array, " X"]

    @classmethod
    def empty(cls) -> "GridBarrier":
        """The counters before the first launch of a step, which clears ``other`` whatever it holds.

        Its ones keep the two arrays apart: see `mosaic.emit`, "Arrays that a kernel writes".
        """
        return cls(jnp.zeros(COUNTERS, jnp.int32), jnp.ones(COUNTERS, jnp.int32))


def arrive(counters, which: int) -> None:
    """Count this warpgroup; all that its threads have stored is visible to who waits for it.

    counters: int32 [X] GMEM.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        _emit(_PROXY_FENCE)
        _warpgroup_barrier()
        line = "red.release.gpu.global.add.u32 [$0], 1;"
        line = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; @p {line} }}"  # no branch between wgmma
        _emit(line, address(ref, i32(4 * which)), thread_index())

    run(counters)


def wait_for(counters, which: int, count: int) -> None:
    """Wait until ``count`` warpgroups have arrived; one thread of the warpgroup polls.

    The launch traps if they do not (`count_poll`).
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        place = address(ref, i32(4 * which))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread_index(), i32(0))):
            loop = scf.WhileOp([i32_type()], [i32(0)])
            before = loop.before.blocks.append(i32_type())
            with ir.InsertionPoint(before):
                [found] = load_vector("ld.acquire.gpu.global", place, 1)
                is_early = arith.cmpi(arith.CmpIPredicate.slt, found, i32(count))
                scf.condition(is_early, list(before.arguments))
            after = loop.after.blocks.append(i32_type())
            with ir.InsertionPoint(after):
                scf.yield_([count_poll(*after.arguments)])
        _warpgroup_barrier()
        _emit(_PROXY_FENCE)

    run(counters)


def clear(counters) -> None:
    """Set all counters to 0; one warpgroup of the launch calls this."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(_, ref):
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread_index(), i32(COUNTERS))):
            store_words(address(ref, arith.muli(thread_index(), i32(4))), [i32(0)], "")

    run(counters)


def _warpgroup_barrier() -> None:
    """Wait for all threads of the warpgroup, by a barrier marked convergent.

    Pallas' own barrier is not marked so: LLVM may copy it into branches before it.
    """
    barrier = arith.addi(arith.divui(mgpu.utils.thread_idx(), i32(THREADS)), i32(1))
    _emit(f"bar.sync $0, {THREADS};", barrier)


def _emit(line: str, *operands) -> None:
    kinds = ",".join("r" if operand.type == i32_type() else "l" for operand in operands)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        list(operands),
        line,
        kinds,
        has_side_effects=True,
        convergent=True,
    )
