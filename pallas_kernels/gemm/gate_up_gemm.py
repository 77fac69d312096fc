"""Gate-up GEMM of few rows on Hopper (``skinny_gemm``) with SwiGLU in the epilogue.

One CTA computes 128 columns of both matrices if that gives enough CTAs, else 64. With 64, two CTAs
share an SM if there are enough of them, so that one streams weights while the other finishes.
Bytes moved besides weights and rows: 2 * T * F of results.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm import skinny_gemm
from rjax.pallas_kernels.gemm.activation import swiglu
from rjax.pallas_kernels.gemm.base import (
    LinearProblem,
    only_norm_of_one_row,
    only_swiglu,
    only_unquantised,
    streaming_kernel,
)
from rjax.pallas_kernels.gemm.gemv_row import NormedRow, RowSource
from rjax.pallas_kernels.gemm.skinny_gemm import GemmConfig, pipeline_stages, store_rows
from rjax.pallas_kernels.mosaic.emit import num_sms
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.add_rms_norm import add_rms_norm

_BLOCK_K = 64
_MAX_ROWS_OF_TWO_CTAS = 64  # with more rows, one CTA fills an SM
_MIN_CTAS_PER_SM = 0.8
_SMEM_BYTES = 220 << 10  # of an SM


def gate_up_gemm(
    h: Float[Array, "T D"], w: Float[Array, "D 2 F"], *, early_weights: bool = False
) -> Float[Array, "T F"]:
    """silu(h @ w[:, 0]) * (h @ w[:, 1]) in h's dtype (SwiGLU; Shazeer, 2020).

    Sums and activation are float32, and only the result is rounded. A GEMM followed by
    ``silu_and_mul`` rounds the sums too, so its last bits differ.

    Args:
        h, w: bfloat16 or float16, the same for both. T is 1, 8, 16, 32, 64 or 128; D and F are
            multiples of 64, and D is a multiple of 128 if T is 1.
        early_weights: whether no kernel of the program writes w, so that it may be read early.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return _gemm(h, w, early_weights)[0]


def norm_gate_up_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
    w: Float[Array, "D 2 F"],
    *,
    early_weights: bool = False,
) -> tuple[Float[Array, "1 D"], Float[Array, "1 F"]]:
    """(x + update, ``gate_up_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``.

    One launch. If two CTAs share an SM, the norm is a separate kernel, because it would delay their
    weight loads.
    """
    if _choose_config(1, *w.shape[::2])[1] > 1:
        residual, h = add_rms_norm(x, update, weight, eps)
        return residual, _gemm(h, w, early_weights)[0]
    hidden, residual = _gemm(NormedRow(x, update, weight, eps), w, early_weights)
    return residual, hidden


def _gemm(
    h: Float[Array, "T D"] | RowSource, w: Float[Array, "D 2 F"], early_weights: bool
) -> tuple[Array, ...]:
    (T, D), F = h.shape, w.shape[2]

    def epilogue(out, accs, split, row, column):
        store_rows(out, swiglu(*accs).astype(out.dtype), row, column)

    shape = jax.ShapeDtypeStruct((T, F), h.dtype)
    config = _choose_config(T, D, F)[0]
    return skinny_gemm.skinny_gemm(
        "gate_up_gemm", h, w, config, shape, epilogue, early_weights=early_weights
    )


def _choose_config(T: int, D: int, F: int) -> tuple[GemmConfig, int]:
    """The config, and the number of CTAs per SM."""
    enough = num_sms() * _MIN_CTAS_PER_SM <= F // 128
    block_n = 128 if F % 128 == 0 and (T > _MAX_ROWS_OF_TWO_CTAS or enough) else 64
    two = T <= _MAX_ROWS_OF_TWO_CTAS and block_n == 64 and F // block_n > num_sms()
    ctas_per_sm = 2 if two else 1
    stages = pipeline_stages(
        T,
        D,
        block_n=2 * block_n,
        block_k=_BLOCK_K,
        split_k=1,
        smem_bytes=_SMEM_BYTES // ctas_per_sm,
    )
    return GemmConfig(block_n, _BLOCK_K, 1, stages), ctas_per_sm


def _refusal(problem: LinearProblem) -> str | None:
    return only_unquantised(problem) or only_swiglu(problem) or _size_refusal(problem)


def _norm_refusal(problem: LinearProblem) -> str | None:
    why = only_unquantised(problem) or only_swiglu(problem) or only_norm_of_one_row(problem)
    return why or _size_refusal(problem)


def _size_refusal(problem: LinearProblem) -> str | None:
    rows, depth = problem.rows, problem.depth
    why = skinny_gemm.refusal(rows, depth, problem.columns[-1], problem.dtype)
    if why is not None or rows > 1:
        return why
    return skinny_gemm.row_refusal(depth, depth)


def _run(problem: LinearProblem, h: Array, leaves: dict[str, Array]) -> Array:
    return gate_up_gemm(h, leaves["weight"], early_weights=problem.early_weights)


def _run_norm(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    w, early = leaves["weight"], problem.early_weights
    return norm_gate_up_gemm(x, update, weight, problem.eps, w, early_weights=early)


KERNELS = (
    streaming_kernel("gate_up", "linear_activation", _refusal, _run),
    streaming_kernel("norm_gate_up", "norm_linear_activation", _norm_refusal, _run_norm),
)
