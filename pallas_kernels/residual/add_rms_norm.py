"""Residual sum and RMSNorm on Hopper, one launch (Mosaic GPU).

One CTA handles one row: it reads x and the update (or its summands) once, keeps the sum in
registers, reduces its squares over the threads, and writes the sum and the normed row. Bytes moved:
4 * D * itemsize a row, or with X summands (3 * itemsize + 4 * X) * D, and the weight.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import THREADS, begin_kernel, store_strided, widest_vector
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.base import ResidualProblem


def refusal(D: int, dtype: DTypeLike, pending_bias: bool = False) -> str | None:
    """Why the kernel cannot take rows of D elements of ``dtype``, or None.

    ``pending_bias`` says whether the update is a Partial with a bias.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return f"x is {jnp.dtype(dtype)}; the mosaic backend needs one 16-bit dtype"
    if D % THREADS:
        return f"rows of {D} elements; the mosaic backend takes multiples of {THREADS}"
    if pending_bias:
        return "a pending bias; the mosaic backend takes updates without one"
    return None


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Args:
        x: bfloat16 or float16; D is a multiple of 128.
        update: an array in x's dtype, or a Partial without a bias.
        weight: any float dtype.
        eps: added to the mean of the squares.

    Raises:
        ValueError: a shape or dtype the kernel does not take.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    T, D = x.shape
    why = refusal(D, x.dtype, isinstance(update, Partial) and update.bias is not None)
    if why is not None:
        raise ValueError(why)
    if update.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and update {update.dtype}; they must be equal")
    addend = update.summands if isinstance(update, Partial) else update
    strided = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

    def add_rms_norm_kernel(x_ref, update_ref, weight_ref, residual_ref, normed_ref):
        """GMEM: x [T, D], update [T, D] or its summands [X, T, D], weight [D], residual [T, D],
        normed [T, D].
        """
        begin_kernel()
        row = lax.axis_index("row")
        inputs = (x_ref, update_ref, weight_ref)
        residual, normed = normed_row(*inputs, row, eps, x.dtype, strided)
        store_strided(residual_ref.at[row], residual, strided)
        store_strided(normed_ref.at[row], normed, strided)

    shape = jax.ShapeDtypeStruct((T, D), x.dtype)
    return plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(shape, shape),
        grid=(T,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, addend, weight)


def normed_row(
    x_ref, update_ref, weight_ref, row, eps: float, dtype: DTypeLike, layout, *, total=jnp.sum
):
    """(x + update, its RMSNorm) of a row, both [D] in ``dtype`` and ``layout`` (WG_STRIDED).

    GMEM: x [T, D], update [T, D] or its summands [X, T, D], weight [D]. total: the sum of [D] over
    the threads that hold it; ``jnp.sum`` where they are all of the CTA.
    """
    D = x_ref.shape[1]

    def read(ref):
        return plgpu.load(ref, layout=layout).astype(jnp.float32)

    scale = read(weight_ref)
    if len(update_ref.shape) == 2:
        update = read(update_ref.at[row])
    else:
        update = read(update_ref.at[0, row])
        for i in range(1, update_ref.shape[0]):
            update = update + read(update_ref.at[i, row])
        update = update.astype(dtype).astype(jnp.float32)
    residual = (read(x_ref.at[row]) + update).astype(dtype)
    y = residual.astype(jnp.float32)
    mean = total(y * y) * (1.0 / D)
    return residual, (y * lax.rsqrt(mean + eps) * scale).astype(dtype)


def _refusal(problem: ResidualProblem) -> str | None:
    return refusal(problem.depth, problem.dtype, problem.pending_bias)


def _run(problem: ResidualProblem, x: Array, update: Array | Partial, weight: Array) -> Any:
    return add_rms_norm(x, update, weight, problem.eps)


KERNEL = Kernel(
    "mosaic.add_rms_norm", "add_rms_norm", "mosaic", _refusal, _run, compute_capabilities=HOPPER
)
