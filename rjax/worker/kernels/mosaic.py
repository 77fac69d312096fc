"""The Mosaic GPU kernels of experts and their router."""

import jax.numpy as jnp
from jaxtyping import Array

from rjax.models import Routing
from rjax.models.routing import router_logits
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.gemm import split_k_gemm
from rjax.pallas_kernels.grouped_gemm import mosaic as grouped_gemm
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.top_k_routing import mosaic as top_k_routing
from rjax.worker.kernels.experts_problem import ExpertsProblem, RouteProblem


def _route_refusal(problem: RouteProblem) -> str | None:
    router = problem.router
    if router.num_groups > 1:
        return f"{router.num_groups} groups of experts; it takes one"
    return top_k_routing.refusal(problem.num_experts, problem.top_k)


def _experts_refusal(problem: ExpertsProblem) -> str | None:
    activation = problem.activation
    if not (activation.is_swiglu or activation.clamp is not None):
        return "it takes silu with a gate"
    for scheme in (problem.scheme, problem.down_scheme):
        if scheme != UNQUANTISED:
            return f"weights stored as {scheme.name}; it takes unquantised ones"
    return grouped_gemm.refusal(problem.depth, problem.columns[-1], problem.dtype)


def _route(
    problem: RouteProblem, h: Array, weight: Array, bias: Array | None, correction: Array | None
) -> Routing:
    router, J = problem.router, problem.num_experts
    shape = problem.rows, problem.depth, J
    padding = top_k_routing.padded_experts(J) - J
    if padding == 0 and bias is None and split_k_gemm.refusal(*shape, problem.dtype) is None:
        logits = split_k_gemm.split_k_gemm(h, weight).summands
    else:
        logits = jnp.pad(router_logits(h, weight, bias), ((0, 0), (0, padding)))[None]
    found = top_k_routing.top_k_routing(
        logits,
        problem.top_k,
        num_experts=J,
        renormalise=router.renormalise,
        scale=router.scale,
        score=router.score,
        correction=correction,
    )
    return Routing(*found)


def _experts(
    problem: ExpertsProblem,
    h: Array,
    chosen: Array,
    weights: Array,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Array | None,
    down_bias: Array | None,
) -> Partial:
    activation = problem.activation
    if problem.needs_partial and down_bias is not None:
        down_bias = down_bias[0]
    clamped = activation.clamped if activation.clamp is not None else None
    return grouped_gemm.experts(
        h,
        chosen,
        weights,
        up["weight"],
        down["weight"],
        up_bias,
        down_bias,
        clamped,
        num_elsewhere=problem.experts_elsewhere,
    )


MOSAIC_KERNELS = tuple(
    Kernel(name, operation, "mosaic", refusal, run, pads_rows=True, compute_capabilities=HOPPER)
    for name, operation, refusal, run in (
        ("mosaic.top_k_routing", "route", _route_refusal, _route),
        ("mosaic.grouped_gemm", "experts", _experts_refusal, _experts),
    )
)
