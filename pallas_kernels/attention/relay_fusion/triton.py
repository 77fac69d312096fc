"""Relay fusion (merge_states) in Triton: merge the partial results of each row, in one launch.

A program merges up to 1024 elements (several heads) of one row. The partial results of a row are
adjacent; the program reads four at a time. Rows with exactly one partial result are skipped: the
attention kernel wrote them to the output. Rows without one get output 0 and LSE -inf.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

_MAX_WIDTH = 1024  # elements of a program
_BATCH = 4  # partial results read at once


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

    Method: RelayAttention (Zhu et al., ACL 2024), generalised to any number of segments.
    """
    import jax_triton

    T, N, H = out.shape
    width = min(_MAX_WIDTH, triton.next_power_of_2(N * H))
    return jax_triton.triton_call(
        out,
        lse,
        partial_out,
        partial_lse,
        merge_indptr,
        kernel=_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(lse.shape, lse.dtype),
        ),
        input_output_aliases={0: 0, 1: 1},
        grid=(T, triton.cdiv(N * H, width)),
        num_warps=4,
        num_stages=1,
        N=N,
        H=H,
        WIDTH=width,
        BATCH=_BATCH,
    )


# Triton reads the function's source: a type checker's wrapper would hide it.
@triton.jit
@no_type_check
def _kernel(
    out_before,
    lse_before,
    partial_out,
    partial_lse,
    merge_indptr,
    out,
    lse,
    N: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
):
    """``out`` and ``lse`` alias ``out_before`` and ``lse_before``."""
    row = tl.program_id(0)
    begin = tl.load(merge_indptr + row)
    end = tl.load(merge_indptr + row + 1)
    if end - begin != 1:
        number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = number < N * H
        head = number // H
        row_max = tl.full((WIDTH,), float("-inf"), tl.float32)
        row_sum = tl.zeros((WIDTH,), tl.float32)
        acc = tl.zeros((WIDTH,), tl.float32)
        for first in range(begin, end, BATCH):
            entry = (first + tl.arange(0, BATCH)).to(tl.int64)[:, None]
            live = (entry < end) & inside[None, :]
            log = tl.load(partial_lse + entry * N + head[None, :], mask=live, other=float("-inf"))
            value = tl.load(partial_out + entry * (N * H) + number[None, :], mask=live, other=0.0)
            new_max = tl.maximum(row_max, tl.max(log, 0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight = tl.exp(log - base[None, :])
            rescale = tl.exp(row_max - base)
            row_max = new_max
            row_sum = row_sum * rescale + tl.sum(weight, 0)
            acc = acc * rescale + tl.sum(weight * value.to(tl.float32), 0)
        safe = tl.where(row_sum == 0, 1.0, row_sum)
        merged = (acc / safe).to(out.dtype.element_ty)
        log_sum = tl.where(row_sum == 0, float("-inf"), row_max + tl.log(safe))
        row_at = row.to(tl.int64) * N
        tl.store(out + row_at * H + number, merged, mask=inside)
        tl.store(lse + row_at + head, log_sum, mask=inside & (number % H == 0))
