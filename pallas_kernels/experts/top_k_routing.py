"""Top-k routing on Hopper, one launch (Mosaic GPU).

One CTA handles one row: it adds the summands of the logits, makes scores of them, and takes the
best expert X times. Bytes moved: 4 * Z * J a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from rjax.pallas_kernels.experts.base import RouteProblem, Router, Routing, router_logits
from rjax.pallas_kernels.gemm import split_k_gemm
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import THREADS, begin_kernel, widest_vector


def refusal(num_experts: int, top_k: int) -> str | None:
    """Why the kernel cannot choose ``top_k`` of ``num_experts``, or None."""
    if top_k > num_experts:
        return f"{top_k} experts of a row of {num_experts}"
    return None if top_k <= 16 else f"{top_k} experts of a row; the kernel takes at most 16"


def padded_experts(num_experts: int) -> int:
    """Columns that the kernel reads: the experts, up to a multiple of 128."""
    return -(-num_experts // THREADS) * THREADS


def top_k_routing(
    logits: Float32[Array, "Z T columns"],
    router: Router,
    top_k: int,
    *,
    num_experts: int,
    correction: Float[Array, " J"] | None = None,
) -> Routing:
    """The experts of the best scores of each row, the lower index first, as `base.route`.

    Args:
        logits: Z summands, of `padded_experts` columns; those past J are ignored.
        router: the scores and weights; it has one group of experts.
        top_k: X.
        num_experts: J.
        correction: added to the scores for the choice only.

    Raises:
        ValueError: a shape the kernel does not take.
    """
    Z, T, columns = logits.shape
    why = refusal(num_experts, top_k)
    if why is not None:
        raise ValueError(why)
    if columns != padded_experts(num_experts):
        raise ValueError(
            f"logits have {columns} columns; the kernel takes {padded_experts(num_experts)} for "
            f"{num_experts} experts"
        )
    strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=widest_vector(columns))
    operands = [logits]
    if correction is not None:
        padding = columns - num_experts
        operands.append(jnp.pad(correction.astype(jnp.float32), (0, padding)))

    def top_k_routing_kernel(logits_ref, *refs):
        """GMEM float32: logits [Z, T, columns], correction [columns] or none; experts int32 [T, X],
        weights [T, X]."""
        begin_kernel()
        *given, experts_ref, weights_ref = refs
        row = lax.axis_index("row")
        x = plgpu.load(logits_ref.at[0, row], layout=strided)
        for z in range(1, Z):
            x = x + plgpu.load(logits_ref.at[z, row], layout=strided)
        # Indices as float32, which the reductions take; they are exact.
        at = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=strided).astype(jnp.float32)
        x = jnp.where(at < float(num_experts), x, -jnp.inf)
        if router.score == "softmax":
            x = jnp.exp(x - jnp.max(x))
            x = x / jnp.sum(x)
        elif router.score == "sigmoid":
            x = 1.0 / (1.0 + jnp.exp(-x))
        choice = x
        if given:
            choice = x + plgpu.load(given[0], layout=strided)
        choice = jnp.where(at < float(num_experts), choice, -jnp.inf)
        best, chosen = [], []
        for _ in range(top_k):
            highest = jnp.max(choice)
            first = -jnp.max(jnp.where(choice == highest, -at, -float(columns)))
            if given:
                highest = jnp.max(jnp.where(at == first, x, -jnp.inf))
            choice = jnp.where(at == first, -jnp.inf, choice)
            best.append(highest)
            chosen.append(first.astype(jnp.int32))
        if router.score == "softmax_of_topk":
            best = [jnp.exp(value - best[0]) for value in best]
        factor = jnp.float32(router.scale)
        if router.renormalise or router.score == "softmax_of_topk":
            total = best[0]
            for value in best[1:]:
                total = total + value
            factor = factor / total
        for i, (expert, value) in enumerate(zip(chosen, best, strict=True)):
            experts_ref[row, i] = expert
            weights_ref[row, i] = value * factor

    shape = (T, top_k)
    found = plgpu.kernel(
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
    )(*operands)
    return Routing(*found)


def _refusal(problem: RouteProblem) -> str | None:
    if problem.router.num_groups > 1:
        return f"{problem.router.num_groups} groups of experts; it takes one"
    return refusal(problem.num_experts, problem.top_k)


def _run(
    problem: RouteProblem, h: Array, weight: Array, bias: Array | None, correction: Array | None
) -> Routing:
    J = problem.num_experts
    shape = problem.rows, problem.depth, J
    padding = padded_experts(J) - J
    if padding == 0 and bias is None and split_k_gemm.refusal(*shape, problem.dtype) is None:
        logits = split_k_gemm.split_k_gemm(h, weight).summands
    else:
        logits = jnp.pad(router_logits(h, weight, bias), ((0, 0), (0, padding)))[None]
    return top_k_routing(
        logits, problem.router, problem.top_k, num_experts=J, correction=correction
    )


KERNEL = Kernel(
    "mosaic.top_k_routing",
    "route",
    "mosaic",
    _refusal,
    _run,
    pads_rows=True,
    compute_capabilities=HOPPER,
)
