"""Relay fusion on Hopper: merge each row's partial results where they lie, in one launch.

A program merges up to 1024 numbers (several heads) of one row: it reads the row's partial results,
which lie one after another, several at a time so that their loads overlap, keeps a running maximum
of the LSEs in float32 and writes the merged chunk. Bytes moved: each partial result once, the
merged row once. Rows with exactly one partial result are skipped: attention wrote them to the
output itself. Rows with none get output 0 and LSE -inf.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_emit import SCALAR, THREADS

_WIDEST = 8  # elements a thread at most: 16 bytes of bf16
_MOST_AT_ONCE = 16  # partial results whose loads are in flight together
_LOWEST = -1e30


def merge_in_place(
    out: Float[Array, "T N H"],
    lse: Float[Array, "T N"],
    part: Float[Array, "X N H"],
    part_lse: Float[Array, "X N"],
    merge_indptr: Int[Array, " T1"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Fill the rows of (out, lse) that have not exactly one partial result.

    Args:
        out, lse: results with the rows of one partial result already in place.
        part, part_lse: partial results; row t owns entries merge_indptr[t] : merge_indptr[t + 1].
            An entry with LSE -inf must hold finite numbers, and does not count.
        merge_indptr: int32.

    Returns:
        (out, lse); float32 arithmetic, natural-log LSE.

    Raises:
        ValueError: H is no multiple of 8, or N * H below 128.

    Method: RelayAttention (Zhu et al., ACL 2024), generalised to any number of segments.
    """
    T, N, H = out.shape
    width = N * H
    if H % _WIDEST or width < THREADS:
        raise ValueError(
            f"{N} heads of {H} dims; relay fusion on mosaic needs head dims that are multiples of "
            f"{_WIDEST} and at least {THREADS} numbers a row"
        )
    step = _WIDEST
    while step * THREADS > width:
        step //= 2
    size = step * THREADS  # numbers a program merges; the last program overlaps its neighbour
    entries = part.shape[0]
    at_once = _MOST_AT_ONCE
    while at_once > 2 and at_once // 2 * T >= entries:  # no row has more than the plan has cuts
        at_once //= 2
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=step)

    def head_values(ref, entry, first):
        """part_lse[entry, head of each of the chunk's elements], float32 [size]."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SCALAR, SCALAR),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=strided),
        )
        def load(_, ref_, entry_, first_):
            index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
            [row], [start] = entry_.registers.flat, first_.registers.flat
            lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, i32))
            element = arith.addi(start, arith.muli(lane, mgpu.c(step, i32)))
            head = arith.divui(element, mgpu.c(H, i32))
            value = memref.load(ref_, [arith.index_cast(index, row), arith.index_cast(index, head)])
            layout = strided.to_mgpu()
            result = mgpu.FragmentedArray.splat(value, (size,), layout)
            assert all(isinstance(r.type, ir.VectorType) for r in result.registers.flat)
            return result

        return load(ref, entry, first)

    chunks = -(-width // size)

    def merge_kernel(indptr, parts, lses, out_ref, lse_ref):
        plgpu.griddepcontrol_wait()
        row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
        first = jnp.minimum(chunk * size, width - size)
        begin = indptr[row]
        end = indptr[row + 1]

        @pl.when(end - begin != 1)
        def _():
            def batch(i, carry):
                acc, top, total = carry
                base = begin + i * at_once
                values, logs = [], []
                for j in range(at_once):
                    entry = jnp.minimum(base + j, end - 1)
                    log = head_values(lses, entry, first)
                    logs.append(jnp.where(base + j < end, log, -jnp.inf))
                    chunk = parts.at[entry, pl.ds(pl.multiple_of(first, step), size)]
                    values.append(plgpu.load(chunk, layout=strided).astype(jnp.float32))
                peak = top
                for log in logs:
                    peak = jnp.maximum(peak, log)
                fade = jnp.exp(top - peak)
                acc, total = acc * fade, total * fade
                for log, value in zip(logs, values, strict=True):
                    weight = jnp.exp(log - peak)
                    acc = acc + weight * value
                    total = total + weight
                return acc, peak, total

            zero = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), strided)
            lowest = plgpu.layout_cast(jnp.full((size,), _LOWEST, jnp.float32), strided)
            batches = lax.div(end - begin + at_once - 1, jnp.int32(at_once))
            acc, top, total = lax.fori_loop(0, batches, batch, (zero, lowest, zero))
            empty = total == 0
            safe = jnp.where(empty, 1.0, total)
            merged = jnp.where(empty, 0.0, acc / safe)
            log_sum = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
            target = out_ref.at[row, pl.ds(pl.multiple_of(first, step), size)]
            target[...] = merged.astype(out_ref.dtype)
            _store_heads(lse_ref, log_sum, row, first, H, strided, step)

    out_ref = jax.new_ref(out.reshape(T, width))
    lse_ref = jax.new_ref(lse)
    plgpu.kernel(
        merge_kernel,
        out_type=(),
        grid=(T, chunks),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(merge_indptr, part.reshape(entries, width), part_lse, out_ref, lse_ref)
    return jax.freeze(out_ref).reshape(T, N, H), jax.freeze(lse_ref)


def _store_heads(ref, value, row, first, H: int, strided, step: int):
    """ref[row, head] = value at the head's first element."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), strided, SCALAR, SCALAR))
    def store(_, ref_, value_, row_, first_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [at], [start] = row_.registers.flat, first_.registers.flat
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, i32))
        element = arith.addi(start, arith.muli(lane, mgpu.c(step, i32)))
        head = arith.divui(element, mgpu.c(H, i32))
        is_first = arith.cmpi(
            arith.CmpIPredicate.eq, arith.remui(element, mgpu.c(H, i32)), mgpu.c(0, i32)
        )
        [register] = value_.registers.flat
        scalar = vector.extract(
            register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
        )
        with mgpu.when(is_first):
            memref.store(scalar, ref_, [arith.index_cast(index, at), arith.index_cast(index, head)])

    store(ref, value, row, first)
