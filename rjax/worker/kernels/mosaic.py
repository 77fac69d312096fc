"""The Mosaic GPU kernels between the attention kernels."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rjax.models import Routing
from rjax.models.routing import router_logits
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.gate_up_gemm import mosaic as gate_up_gemm
from rjax.pallas_kernels.grouped_gemm import mosaic as grouped_gemm
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.silu_and_mul import mosaic as silu_and_mul
from rjax.pallas_kernels.split_k_gemm import mosaic as split_k_gemm
from rjax.pallas_kernels.top_k_routing import mosaic as top_k_routing
from rjax.worker.kernels.experts_problem import ExpertsProblem, RouteProblem
from rjax.worker.kernels.linear_problem import LinearProblem


def _only_unquantised(problem: LinearProblem) -> str | None:
    assert problem.scheme is not None
    if problem.scheme.name != "unquantised":
        return f"weights stored as {problem.scheme.name}; it takes unquantised ones"
    return None


def _only_swiglu(problem: LinearProblem) -> str | None:
    if problem.activation is None or not problem.activation.is_swiglu:
        return "it takes silu with a gate"
    return "a bias before the activation" if problem.bias else None


def _split_k_refusal(problem: LinearProblem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.refusal(
        problem.rows, problem.depth, problem.width, problem.dtype
    )


def _norm_split_k_refusal(problem: LinearProblem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.normed_refusal(
        problem.rows, problem.depth, problem.width, problem.dtype, problem.pending_bias
    )


def _merge_split_k_refusal(problem: LinearProblem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.merged_refusal(
        problem.rows, problem.depth, problem.width, problem.dtype
    )


def _gated_refusal(problem: LinearProblem) -> str | None:
    return (
        _only_unquantised(problem)
        or _only_swiglu(problem)
        or gate_up_gemm.refusal(problem.rows, problem.depth, problem.columns[-1], problem.dtype)
    )


def _norm_gated_refusal(problem: LinearProblem) -> str | None:
    return (
        _only_unquantised(problem)
        or _only_swiglu(problem)
        or gate_up_gemm.normed_refusal(
            problem.rows, problem.depth, problem.columns[-1], problem.dtype, problem.pending_bias
        )
    )


def _activation_refusal(problem: LinearProblem) -> str | None:
    return _only_swiglu(problem) or silu_and_mul.refusal(problem.columns[-1], problem.dtype)


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


def _flat(problem: LinearProblem, leaves: dict[str, Array]) -> Array:
    return leaves["weight"].reshape(problem.depth, -1)


def _shaped(problem: LinearProblem, partial: Partial) -> Partial:
    summands = partial.summands
    return Partial(summands.reshape(*summands.shape[:2], *problem.columns), dtype=partial.dtype)


def _split_k(problem: LinearProblem, h: Array, leaves: dict[str, Array]) -> Partial:
    weight, early = _flat(problem, leaves), problem.early_weights
    return _shaped(problem, split_k_gemm.split_k_gemm(h, weight, early_weights=early))


def _norm_split_k(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Partial]:
    x, partial = split_k_gemm.norm_split_k_gemm(
        x,
        update,
        weight,
        problem.eps,
        _flat(problem, leaves),
        early_weights=problem.early_weights,
    )
    return x, _shaped(problem, partial)


def _merge_split_k(problem: LinearProblem, attention: Any, leaves: dict[str, Array]) -> Partial:
    weight, early = _flat(problem, leaves), problem.early_weights
    return split_k_gemm.merge_split_k_gemm(attention, weight, early_weights=early)


def _gated(problem: LinearProblem, h: Array, leaves: dict[str, Array]) -> Array:
    return gate_up_gemm.gate_up_gemm(h, leaves["weight"], early_weights=problem.early_weights)


def _norm_gated(
    problem: LinearProblem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    return gate_up_gemm.norm_gate_up_gemm(
        x, update, weight, problem.eps, leaves["weight"], early_weights=problem.early_weights
    )


def _activation(problem: LinearProblem, h: Array) -> Array:
    del problem
    return silu_and_mul.silu_and_mul(h)


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


def _kernel(name: str, operation: str, refusal: Any, run: Any) -> Kernel:
    return Kernel(
        f"mosaic.{name}",
        operation,
        "mosaic",
        refusal,
        run,
        pads_rows=operation != "activation",
        gives_partial=name.endswith("split_k"),
        compute_capabilities=HOPPER,
    )


MOSAIC_KERNELS = (
    _kernel("split_k", "linear", _split_k_refusal, _split_k),
    _kernel("norm_split_k", "norm_linear", _norm_split_k_refusal, _norm_split_k),
    _kernel("merge_split_k", "merge_linear", _merge_split_k_refusal, _merge_split_k),
    _kernel("gate_up", "linear_activation", _gated_refusal, _gated),
    _kernel("norm_gate_up", "norm_linear_activation", _norm_gated_refusal, _norm_gated),
    _kernel("silu_and_mul", "activation", _activation_refusal, _activation),
    _kernel("top_k_routing", "route", _route_refusal, _route),
    _kernel("grouped_gemm", "experts", _experts_refusal, _experts),
)
