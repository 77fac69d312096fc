"""Relay fusion (merge_states) on Hopper: merge the partial results of each row, in one launch.

A CTA merges up to 1024 elements (several heads) of one row; in long prompts, of eight rows one
after the other. The partial results of a row are adjacent. The CTA loads several of them at a time,
so that the loads overlap, keeps a running maximum of the LSEs in float32 (one per thread, whose
elements are of one head), and writes the merged chunk. Bytes moved: each partial result once, the
merged row once. Rows with exactly one partial result are skipped: the attention kernel wrote them
to the output. Rows without one get output 0 and LSE -inf.
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

from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    begin_kernel,
    store_strided,
    thread_index,
)
from rjax.pallas_kernels.pending import UnmergedAttention

_MAX_VECTOR = 8  # elements per thread: 16 bytes of bf16
_SMALL_BATCH, _LARGE_BATCH = 18, 24  # partial results whose loads are in flight at once
_MANY_ROWS, _ROWS_PER_CTA = 1024, 8  # prompts: most rows have one partial result, so CTAs do little
_LOWEST = -1e30
_PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)  # one element per thread


def merge_in_place(
    out: Float[Array, "T N H"],
    lse: Float[Array, "T N"],
    partial_out: Float[Array, "X N H"],
    partial_lse: Float[Array, "X N"],
    merge_indptr: Int[Array, " T1"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Merge the partial results into (out, lse), for rows that do not have exactly one.

    Args:
        out, lse: results; rows with one partial result hold it already.
        partial_out, partial_lse: row t owns entries merge_indptr[t] : merge_indptr[t + 1]. An entry
            with LSE -inf is ignored, but must be finite.
        merge_indptr: int32.

    Returns:
        (out, lse); float32 arithmetic, natural-log LSE.

    Raises:
        ValueError: H is not a multiple of 8, or N * H is below 128.

    Method: RelayAttention (Zhu et al., ACL 2024), generalised to any number of segments.
    """
    merged, merged_lse = _merge(out, lse, partial_out, partial_lse, merge_indptr)
    assert merged_lse is not None
    return merged, merged_lse


# A jitted function of its own: the layers of a model share one trace and one lowering.
@jax.jit
def merge_rows(attention: UnmergedAttention) -> Float[Array, "T N H"]:
    """The merged results of ``unmerged_attention``, as ``merge_in_place``, without their LSE."""
    partial = attention.partial_out, attention.partial_lse, attention.merge_indptr
    return _merge(attention.out, None, *partial)[0]


def _merge(
    out: Float[Array, "T N H"],
    lse: Float[Array, "T N"] | None,
    partial_out: Float[Array, "X N H"],
    partial_lse: Float[Array, "X N"],
    merge_indptr: Int[Array, " T1"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"] | None]:
    T, N, H = out.shape
    width = N * H
    if H % _MAX_VECTOR or width < THREADS:
        raise ValueError(
            f"{N} heads of {H} dims; relay fusion on mosaic needs head dims that are multiples of "
            f"{_MAX_VECTOR} and at least {THREADS} elements per row"
        )
    step = merge_vector(width)
    size = step * THREADS  # elements of a CTA; the last chunk overlaps the one before
    entries = partial_out.shape[0]
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=step)
    chunks = -(-width // size)
    rows = 1 if T <= _MANY_ROWS else _ROWS_PER_CTA

    def merge_kernel(indptr, outs, lses, out_ref, *lse_refs):
        """GMEM: indptr int32 [T + 1], outs [X, N * H], lses [X, N], out [T, N * H], and perhaps
        lse [T, N]."""
        begin_kernel()
        block, chunk = lax.axis_index("rows"), lax.axis_index("chunk")
        first = jnp.minimum(chunk * size, width - size)

        def merge_row(row):
            begin = indptr[row]
            end = indptr[row + 1]

            def store(merged, log_sum):
                target = out_ref.at[row, pl.ds(pl.multiple_of(first, step), size)]
                store_strided(target, merged.astype(out_ref.dtype), strided)
                for lse_ref in lse_refs:
                    _store_head(lse_ref, log_sum, row, first, H, step)

            pl.when(end - begin != 1)(
                lambda: merge_entries(outs, lses, begin, end, first, step, H, store)
            )

        stop = jnp.minimum((block + 1) * rows, T)
        lax.fori_loop(block * rows, stop, lambda row, _: merge_row(row), None)

    out_ref = jax.new_ref(out.reshape(T, width))
    lse_refs = [] if lse is None else [jax.new_ref(lse)]
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
    )(merge_indptr, partial_out.reshape(entries, width), partial_lse, out_ref, *lse_refs)
    [found] = [jax.freeze(ref) for ref in lse_refs] or [None]
    return jax.freeze(out_ref).reshape(T, N, H), found


def merge_vector(width: int) -> int:
    """Elements that a thread merges, so that a row of ``width`` elements fills 128 threads."""
    step = _MAX_VECTOR
    while step * THREADS > width:
        step //= 2
    return step


def merge_entries(outs, lses, begin, end, first, step: int, H: int, store) -> None:
    """Merge 128 * step columns of a row, from column ``first`` on, and call ``store(merged, lse)``.

    outs: [X, N * H], lses: float32 [X, N], in GMEM; the row owns entries ``begin`` to ``end``,
    int32. first: int32, a multiple of step. merged: float32 [128 * step]. lse: float32 [128], for
    each thread that of its head. A row without entries gives 0 and -inf.
    """
    size = step * THREADS
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=step)

    def broadcast(value):
        """float32 [THREADS], one per thread, to [size]."""

        @plgpu.inline_mgpu(
            arg_types=(_PER_THREAD,),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=strided),
        )
        def emit(_, value_):
            return mgpu.FragmentedArray.splat(_scalar(value_), (size,), strided.to_mgpu())

        return emit(value)

    def merge_batch(batch: int, base, carry):
        """Merge ``batch`` entries from ``base`` on into the carry; entries past ``end`` count 0."""
        acc, row_max, row_sum = carry
        values, logs = [], []
        for j in range(batch):
            entry = jnp.minimum(base + j, end - 1)
            log = _load_head(lses, entry, first, H, step)
            logs.append(jnp.where(base + j < end, log, -jnp.inf))
            chunk = outs.at[entry, pl.ds(pl.multiple_of(first, step), size)]
            values.append(plgpu.load(chunk, layout=strided).astype(jnp.float32))
        new_max = functools.reduce(jnp.maximum, logs, row_max)
        rescale = jnp.exp(row_max - new_max)
        acc, row_sum = acc * broadcast(rescale), row_sum * rescale
        for log, value in zip(logs, values, strict=True):
            weight = jnp.exp(log - new_max)
            acc = acc + broadcast(weight) * value
            row_sum = row_sum + weight
        return acc, new_max, row_sum

    def merge(batch: int):
        zero = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), strided)
        lowest = plgpu.layout_cast(jnp.full((THREADS,), _LOWEST, jnp.float32), _PER_THREAD)
        none = plgpu.layout_cast(jnp.zeros((THREADS,), jnp.float32), _PER_THREAD)
        batches = lax.div(end - begin + batch - 1, jnp.int32(batch))

        def run(i, carry):
            return merge_batch(batch, begin + i * batch, carry)

        acc, row_max, row_sum = lax.fori_loop(0, batches, run, (zero, lowest, none))
        empty = row_sum == 0
        safe = jnp.where(empty, 1.0, row_sum)
        inverse = jnp.where(empty, 0.0, 1.0 / safe)
        store(acc * broadcast(inverse), jnp.where(empty, -jnp.inf, row_max + jnp.log(safe)))

    # The loads of one batch are in flight at once; a small batch waits for fewer of them.
    few = end - begin <= _SMALL_BATCH
    pl.when(few)(lambda: merge(_SMALL_BATCH))
    pl.when(jnp.logical_not(few))(lambda: merge(_LARGE_BATCH))


def _load_head(ref, entry, first, H: int, step: int):
    """ref[entry, head of the thread's elements], float32 [THREADS], one per thread."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=_PER_THREAD),
    )
    def load(_, ref_, entry_, first_):
        index = ir.IndexType.get()
        [row] = entry_.registers.flat
        head, _ = _head_of(first_, H, step)
        value = memref.load(ref_, [arith.index_cast(index, row), arith.index_cast(index, head)])
        return mgpu.FragmentedArray.splat(value, (THREADS,), _PER_THREAD.to_mgpu())

    return load(ref, entry, first)


def _store_head(ref, value, row, first, H: int, step: int):
    """ref[row, head] = value, by the thread that has the head's first element."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _PER_THREAD, SCALAR, SCALAR))
    def store(_, ref_, value_, row_, first_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        [at] = row_.registers.flat
        head, dim = _head_of(first_, H, step)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, dim, mgpu.c(0, i32))):
            target = [arith.index_cast(index, at), arith.index_cast(index, head)]
            memref.store(_scalar(value_), ref_, target)

    store(ref, value, row, first)


def _head_of(first, H: int, step: int):
    """(head, dim) of the thread's first element, int32."""
    i32 = ir.IntegerType.get_signless(32)
    [start] = first.registers.flat
    element = arith.addi(start, arith.muli(thread_index(), mgpu.c(step, i32)))
    return arith.divui(element, mgpu.c(H, i32)), arith.remui(element, mgpu.c(H, i32))


def _scalar(value):
    """The element that each thread holds of [THREADS]."""
    [register] = value.registers.flat
    return vector.extract(
        register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
    )
