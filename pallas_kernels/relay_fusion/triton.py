"""Relay fusion in Triton: merge each row's partial results where they lie, in one launch.

A program merges up to 1024 numbers (several heads) of one row, whose partial results lie one after
another, four at a time. Rows with exactly one partial result are skipped: attention wrote them to
the output itself. Rows with none get output 0 and LSE -inf.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from typing import no_type_check

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

_WIDEST = 1024  # numbers a program
_AT_ONCE = 4  # partial results read together


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

    Method: RelayAttention (Zhu et al., ACL 2024), generalised to any number of segments.
    """
    import jax_triton

    T, N, H = out.shape
    width = min(_WIDEST, triton.next_power_of_2(N * H))
    return jax_triton.triton_call(
        out,
        lse,
        part,
        part_lse,
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
        AT_ONCE=_AT_ONCE,
    )


# Triton reads the function's source: a type checker's wrapper would hide it.
@triton.jit
@no_type_check
def _kernel(
    out_before,
    lse_before,
    part,
    part_lse,
    merge_indptr,
    out,
    lse,
    N: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """``out`` and ``lse`` lie where ``out_before`` and ``lse_before`` did."""
    row = tl.program_id(0)
    begin = tl.load(merge_indptr + row)
    end = tl.load(merge_indptr + row + 1)
    if end - begin != 1:
        number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = number < N * H
        head = number // H
        top = tl.full((WIDTH,), float("-inf"), tl.float32)
        total = tl.zeros((WIDTH,), tl.float32)
        acc = tl.zeros((WIDTH,), tl.float32)
        for first in range(begin, end, AT_ONCE):
            entry = (first + tl.arange(0, AT_ONCE)).to(tl.int64)[:, None]
            live = (entry < end) & inside[None, :]
            log = tl.load(part_lse + entry * N + head[None, :], mask=live, other=float("-inf"))
            value = tl.load(part + entry * (N * H) + number[None, :], mask=live, other=0.0)
            peak = tl.maximum(top, tl.max(log, 0))
            base = tl.where(peak == float("-inf"), 0.0, peak)
            weight = tl.exp(log - base[None, :])
            fade = tl.exp(top - base)
            top = peak
            total = total * fade + tl.sum(weight, 0)
            acc = acc * fade + tl.sum(weight * value.to(tl.float32), 0)
        safe = tl.where(total == 0, 1.0, total)
        merged = (acc / safe).to(out.dtype.element_ty)
        log_sum = tl.where(total == 0, float("-inf"), top + tl.log(safe))
        row_at = row.to(tl.int64) * N
        tl.store(out + row_at * H + number, merged, mask=inside)
        tl.store(lse + row_at + head, log_sum, mask=inside & (number % H == 0))
