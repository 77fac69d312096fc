"""Gate-up GEMM of few rows on Hopper (``skinny_gemm``) with SwiGLU in the epilogue.

One CTA computes 128 columns of both matrices if that gives enough CTAs, else 64. With 64, two CTAs
share an SM if there are enough of them, so that one streams weights while the other finishes.
Bytes moved besides weights and rows: 2 * T * F of results.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import skinny_gemm
from pallas_kernels.add_rms_norm.mosaic import add_rms_norm
from pallas_kernels.gemv_row import NormedRow, RowSource
from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.partial import Partial
from pallas_kernels.skinny_gemm import Cut, ring_slots, store_rows

_CHUNK = 64
_ALONE = 64  # rows; programs of more fill a multiprocessor
_ENOUGH = 0.8  # programs for each multiprocessor
_SHARED_BYTES = 220 << 10  # of a multiprocessor


def refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why `gate_up_gemm` cannot multiply [rows, depth] with twice [depth, columns], or None."""
    why = skinny_gemm.refusal(rows, depth, columns, dtype)
    if why is not None or rows > 1:
        return why
    return skinny_gemm.row_refusal(depth, depth)


def normed_refusal(
    rows: int, depth: int, columns: int, dtype: DTypeLike, pending_bias: bool
) -> str | None:
    """Why `norm_gate_up_gemm` cannot, or None."""
    if rows != 1:
        return f"{rows} rows; a norm is part of the product for one row only"
    if pending_bias:
        return "a pending bias; it takes updates without one"
    return refusal(rows, depth, columns, dtype)


def gate_up_gemm(h: Float[Array, "T D"], w: Float[Array, "D 2 F"]) -> Float[Array, "T F"]:
    """silu(h @ w[:, 0]) * (h @ w[:, 1]) in h's dtype (SwiGLU; Shazeer, 2020).

    Sums and activation are float32 and only the result is rounded, where a product followed by
    ``silu_and_mul`` rounds the sums too: the two differ in the last bits.

    Args:
        h, w: bfloat16 or float16, both alike; T is 1, 8, 16, 32, 64 or 128, D and F multiples of
            64, D of 128 where T is 1.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    return _gated(h, w)[0]


def norm_gate_up_gemm(
    x: Float[Array, "1 D"],
    update: Float[Array, "1 D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
    w: Float[Array, "D 2 F"],
) -> tuple[Float[Array, "1 D"], Float[Array, "1 F"]]:
    """(x + update, ``gate_up_gemm`` of its RMSNorm); arguments as in ``add_rms_norm``.

    One launch, but where two programs share a multiprocessor: those have no time to spare for the
    norm, which then is a kernel of its own.
    """
    if _cut(1, *w.shape[::2])[1] > 1:
        total, h = add_rms_norm(x, update, weight, eps)
        return total, _gated(h, w)[0]
    hidden, total = _gated(NormedRow(x, update, weight, eps), w)
    return total, hidden


def _gated(h: Float[Array, "T D"] | RowSource, w: Float[Array, "D 2 F"]) -> tuple[Array, ...]:
    (T, D), F = h.shape, w.shape[2]

    def finish(out, totals, part, row, column):
        gate, up = totals
        hidden = gate / (1.0 + jnp.exp(-gate)) * up
        store_rows(out, hidden.astype(out.dtype), row, column)

    shape = jax.ShapeDtypeStruct((T, F), h.dtype)
    return skinny_gemm.skinny_gemm("gate_up_gemm", h, w, _cut(T, D, F)[0], shape, finish)


def _cut(T: int, D: int, F: int) -> tuple[Cut, int]:
    """The cut, and how many programs share a multiprocessor."""
    wide = F % 128 == 0 and (T > _ALONE or _ENOUGH * multiprocessors() <= F // 128)
    columns = 128 if wide else 64
    together = 2 if T <= _ALONE and not wide and F // columns > multiprocessors() else 1
    ring = ring_slots(
        T,
        D,
        columns=2 * columns,
        chunk=_CHUNK,
        splits=1,
        shared_bytes=_SHARED_BYTES // together,
    )
    return Cut(columns, _CHUNK, 1, ring), together
