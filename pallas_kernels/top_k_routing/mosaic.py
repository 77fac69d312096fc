"""Top-k routing on Hopper, one launch (Mosaic GPU).

One CTA handles one row: it adds the summands of the logits, makes scores of them, and takes the
best expert X times. Bytes moved: 4 * Z * J a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int

from rjax.pallas_kernels.mosaic_emit import THREADS, widest_vector

_CHOSEN = -1.0  # below every score


def refusal(num_experts: int, top_k: int) -> str | None:
    """Why the kernel cannot choose ``top_k`` of ``num_experts``, or None."""
    if num_experts % THREADS:
        return f"{num_experts} experts; the kernel takes multiples of {THREADS}"
    return None if top_k <= 16 else f"{top_k} experts of a row; the kernel takes at most 16"


def top_k_routing(
    logits: Float32[Array, "Z T J"], top_k: int, *, renormalise: bool, scale: float
) -> tuple[Int[Array, "T X"], Float32[Array, "T X"]]:
    """(experts of each row, their weights): the largest of the softmax, the lower index first.

    Args:
        logits: Z summands.
        top_k: X.
        renormalise: divide the weights of a row by their sum.
        scale: factor of the weights.

    Raises:
        ValueError: a shape the kernel does not take.
    """
    Z, T, J = logits.shape
    why = refusal(J, top_k)
    if why is not None:
        raise ValueError(why)
    strided = plgpu.Layout.WG_STRIDED((J,), vec_size=widest_vector(J))

    def top_k_routing_kernel(logits_ref, experts_ref, weights_ref):
        """GMEM: logits [Z, T, J], experts [T, X], weights [T, X]."""
        row = lax.axis_index("row")
        x = plgpu.load(logits_ref.at[0, row], layout=strided)
        for z in range(1, Z):
            x = x + plgpu.load(logits_ref.at[z, row], layout=strided)
        x = jnp.exp(x - jnp.max(x))
        scores = x / jnp.sum(x)
        # Indices as float32, which the reductions take; they are exact.
        at = plgpu.broadcasted_iota(jnp.int32, (J,), 0, layout=strided).astype(jnp.float32)
        best, chosen = [], []
        for _ in range(top_k):
            score = jnp.max(scores)
            first = -jnp.max(jnp.where(scores == score, -at, -float(J)))
            scores = jnp.where(at == first, _CHOSEN, scores)
            best.append(score)
            chosen.append(first.astype(jnp.int32))
        factor = jnp.float32(scale)
        if renormalise:
            total = best[0]
            for score in best[1:]:
                total = total + score
            factor = factor / total
        for i, (expert, score) in enumerate(zip(chosen, best, strict=True)):
            experts_ref[row, i] = expert
            weights_ref[row, i] = score * factor

    shape = (T, top_k)
    return plgpu.kernel(
        top_k_routing_kernel,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(T,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(logits)
