"""Relay fusion on Hopper: merge each row's partial results where they lie, in one launch.

A program merges up to 1024 numbers (several heads) of one row, or of eight rows in turn in a long
prompt: it reads a row's partial results, which lie one after another, several at a time so that
their loads overlap, keeps a running maximum of the LSEs in float32 (one a thread: a thread's
numbers are of one head) and writes the merged chunk. Bytes moved: each partial result once, the
merged row once. Rows with exactly one partial result are skipped: attention wrote them to the
output itself. Rows with none get output 0 and LSE -inf.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_emit import SCALAR, THREADS, store_strided, thread_index

_WIDEST = 8  # elements a thread at most: 16 bytes of bf16
_FEW, _MANY = 18, 24  # partial results whose loads are in flight together
_MANY_ROWS, _ROWS = 1024, 8  # prompts: most rows have one result, and programs little to do
_LOWEST = -1e30
_EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one number a thread


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
    step = widest_run(width)
    size = step * THREADS  # numbers a program merges; the last program overlaps its neighbour
    entries = part.shape[0]
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=step)
    chunks = -(-width // size)
    rows = 1 if T <= _MANY_ROWS else _ROWS

    def merge_kernel(indptr, parts, lses, out_ref, lse_ref):
        """GMEM: indptr int32 [T + 1], parts [X, N * H], lses [X, N], out [T, N * H], lse [T, N]."""
        plgpu.griddepcontrol_wait()
        block, chunk = lax.axis_index("rows"), lax.axis_index("chunk")
        first = jnp.minimum(chunk * size, width - size)

        def merge_row(row):
            begin = indptr[row]
            end = indptr[row + 1]

            def store(merged, log_sum):
                target = out_ref.at[row, pl.ds(pl.multiple_of(first, step), size)]
                store_strided(target, merged.astype(out_ref.dtype), strided)
                _store_head(lse_ref, log_sum, row, first, H, step)

            pl.when(end - begin != 1)(
                lambda: merge_entries(parts, lses, begin, end, first, step, H, store)
            )

        stop = jnp.minimum((block + 1) * rows, T)
        lax.fori_loop(block * rows, stop, lambda row, _: merge_row(row), None)

    out_ref = jax.new_ref(out.reshape(T, width))
    lse_ref = jax.new_ref(lse)
    plgpu.kernel(
        merge_kernel,
        out_type=(),
        grid=(-(-T // rows), chunks),
        grid_names=("rows", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(merge_indptr, part.reshape(entries, width), part_lse, out_ref, lse_ref)
    return jax.freeze(out_ref).reshape(T, N, H), jax.freeze(lse_ref)


def widest_run(width: int) -> int:
    """Numbers of a row of ``width`` that a thread merges in one register, at least 128 threads."""
    step = _WIDEST
    while step * THREADS > width:
        step //= 2
    return step


def merge_entries(parts, lses, begin, end, first, step: int, H: int, store) -> None:
    """``store(merged, log_sum)``: columns from ``first`` on of what the entries of a row add up to.

    parts: [X, N * H], lses: float32 [X, N], in GMEM; the row owns entries ``begin`` to ``end``,
    int32. first: int32, a multiple of step. merged: float32 [128 * step], log_sum: float32 [128],
    one a thread, of its head; 0 and -inf where there is nothing.
    """
    size = step * THREADS
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=step)

    def spread(value):
        """[THREADS], one number a thread, as [size]."""

        @plgpu.inline_mgpu(
            arg_types=(_EACH,),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=strided),
        )
        def emit(_, value_):
            return mgpu.FragmentedArray.splat(_scalar(value_), (size,), strided.to_mgpu())

        return emit(value)

    def batch(at_once: int, base, carry):
        """The carry with ``at_once`` partial results from ``base`` on, those there are."""
        acc, top, total = carry
        values, logs = [], []
        for j in range(at_once):
            entry = jnp.minimum(base + j, end - 1)
            log = _load_head(lses, entry, first, H, step)
            logs.append(jnp.where(base + j < end, log, -jnp.inf))
            chunk = parts.at[entry, pl.ds(pl.multiple_of(first, step), size)]
            values.append(plgpu.load(chunk, layout=strided).astype(jnp.float32))
        peak = functools.reduce(jnp.maximum, logs, top)
        fade = jnp.exp(top - peak)
        acc, total = acc * spread(fade), total * fade
        for log, value in zip(logs, values, strict=True):
            weight = jnp.exp(log - peak)
            acc = acc + spread(weight) * value
            total = total + weight
        return acc, peak, total

    def merge(at_once: int):
        zero = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), strided)
        lowest = plgpu.layout_cast(jnp.full((THREADS,), _LOWEST, jnp.float32), _EACH)
        none = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.float32), _EACH)
        batches = lax.div(end - begin + at_once - 1, jnp.int32(at_once))

        def run(i, carry):
            return batch(at_once, begin + i * at_once, carry)

        acc, top, total = lax.fori_loop(0, batches, run, (zero, lowest, none))
        empty = total == 0
        safe = jnp.where(empty, 1.0, total)
        inverse = jnp.where(empty, 0.0, 1.0 / safe)
        store(acc * spread(inverse), jnp.where(empty, -jnp.inf, top + jnp.log(safe)))

    # Loads of one batch are in flight together; of few there are fewer to wait for.
    few = end - begin <= _FEW
    pl.when(few)(lambda: merge(_FEW))
    pl.when(jnp.logical_not(few))(lambda: merge(_MANY))


def _load_head(ref, entry, first, H: int, step: int):
    """ref[entry, head of the thread's numbers], float32 [THREADS], one a thread."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=_EACH),
    )
    def load(_, ref_, entry_, first_):
        index = ir.IndexType.get()
        [row] = entry_.registers.flat
        head, _ = _head_of(first_, H, step)
        value = memref.load(ref_, [arith.index_cast(index, row), arith.index_cast(index, head)])
        return mgpu.FragmentedArray.splat(value, (THREADS,), _EACH.to_mgpu())

    return load(ref, entry, first)


def _store_head(ref, value, row, first, H: int, step: int):
    """ref[row, head] = value, by the thread of the head's first number."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _EACH, SCALAR, SCALAR))
    def store(_, ref_, value_, row_, first_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [at] = row_.registers.flat
        head, dim = _head_of(first_, H, step)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, dim, mgpu.c(0, i32))):
            place = [arith.index_cast(index, at), arith.index_cast(index, head)]
            memref.store(_scalar(value_), ref_, place)

    store(ref, value, row, first)


def _head_of(first, H: int, step: int):
    """(head, dim) of the thread's first number, int32."""
    i32 = ir.IntegerType.get_signless(32)
    [start] = first.registers.flat
    element = arith.addi(start, arith.muli(thread_index(), mgpu.c(step, i32)))
    return arith.divui(element, mgpu.c(H, i32)), arith.remui(element, mgpu.c(H, i32))


def _scalar(value):
    """The one number that each thread holds of [THREADS]."""
    [register] = value.registers.flat
    return vector.extract(
        register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
    )
