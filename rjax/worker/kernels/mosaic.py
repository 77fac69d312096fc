"""The Mosaic GPU kernels between the attention kernels."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rjax.models import Routing
from rjax.models.routing import router_logits
from rjax.models.schemes import UNQUANTISED
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.add_rms_norm import mosaic as add_rms_norm
from rjax.pallas_kernels.all_reduce_argmax import mosaic as all_reduce_argmax
from rjax.pallas_kernels.all_reduce_argmax.xla import local_argmax
from rjax.pallas_kernels.all_reduce_rms_norm import mosaic as all_reduce_rms_norm
from rjax.pallas_kernels.gate_up_gemm import mosaic as gate_up_gemm
from rjax.pallas_kernels.grouped_gemm import mosaic as grouped_gemm
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.peer_exchange.peers import Peers
from rjax.pallas_kernels.rope_and_cache import mosaic as rope_and_cache
from rjax.pallas_kernels.silu_and_mul import mosaic as silu_and_mul
from rjax.pallas_kernels.split_k_gemm import mosaic as split_k_gemm
from rjax.pallas_kernels.top_k_routing import mosaic as top_k_routing
from rjax.worker.kernels.kernel import HOPPER, Kernel
from rjax.worker.kernels.problem import Operation, Problem


def _only_unquantised(problem: Problem) -> str | None:
    assert problem.scheme is not None
    if problem.scheme.name != "unquantised":
        return f"weights stored as {problem.scheme.name}; it takes unquantised ones"
    return None


def _only_swiglu(problem: Problem) -> str | None:
    if problem.activation is None or not problem.activation.is_swiglu:
        return "it takes silu with a gate"
    return "a bias before the activation" if problem.bias else None


def _split_k_refusal(problem: Problem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.refusal(
        problem.rows, problem.depth, problem.width, problem.dtype
    )


def _norm_split_k_refusal(problem: Problem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.normed_refusal(
        problem.rows, problem.depth, problem.width, problem.dtype, problem.pending_bias
    )


def _merge_split_k_refusal(problem: Problem) -> str | None:
    return _only_unquantised(problem) or split_k_gemm.merged_refusal(
        problem.rows, problem.depth, problem.width, problem.dtype
    )


def _gated_refusal(problem: Problem) -> str | None:
    return (
        _only_unquantised(problem)
        or _only_swiglu(problem)
        or gate_up_gemm.refusal(problem.rows, problem.depth, problem.columns[-1], problem.dtype)
    )


def _norm_gated_refusal(problem: Problem) -> str | None:
    return (
        _only_unquantised(problem)
        or _only_swiglu(problem)
        or gate_up_gemm.normed_refusal(
            problem.rows, problem.depth, problem.columns[-1], problem.dtype, problem.pending_bias
        )
    )


def _add_rms_norm_refusal(problem: Problem) -> str | None:
    return add_rms_norm.refusal(problem.depth, problem.dtype, problem.pending_bias)


def _all_reduce_refusal(problem: Problem) -> str | None:
    return all_reduce_rms_norm.refusal(
        problem.rows, problem.depth, problem.dtype, problem.peer_capacity
    )


def _all_reduce_argmax_refusal(problem: Problem) -> str | None:
    return all_reduce_argmax.refusal(problem.rows, problem.peer_capacity)


def _activation_refusal(problem: Problem) -> str | None:
    return _only_swiglu(problem) or silu_and_mul.refusal(problem.columns[-1], problem.dtype)


def _rope_and_cache_refusal(problem: Problem) -> str | None:
    return rope_and_cache.refusal(
        problem.head_dim, problem.rotary_dim, problem.dtype, problem.kv_dtype
    )


def _norm_rope_and_cache_refusal(problem: Problem) -> str | None:
    why = rope_and_cache.norm_refusal(problem.head_dim, problem.rotary_dim)
    return why or _rope_and_cache_refusal(problem)


def _route_refusal(problem: Problem) -> str | None:
    router = problem.router
    assert router is not None
    if router.num_groups > 1:
        return f"{router.num_groups} groups of experts; it takes one"
    return top_k_routing.refusal(problem.width, problem.top_k)


def _experts_refusal(problem: Problem) -> str | None:
    activation = problem.activation
    if activation is None or not (activation.is_swiglu or activation.clamp is not None):
        return "it takes silu with a gate"
    for scheme in (problem.scheme, problem.down_scheme):
        if scheme is not None and scheme != UNQUANTISED:
            return f"weights stored as {scheme.name}; it takes unquantised ones"
    return grouped_gemm.refusal(problem.depth, problem.columns[-1], problem.dtype)


def _flat(problem: Problem, leaves: dict[str, Array]) -> Array:
    return leaves["weight"].reshape(problem.depth, -1)


def _shaped(problem: Problem, partial: Partial) -> Partial:
    summands = partial.summands
    return Partial(summands.reshape(*summands.shape[:2], *problem.columns), dtype=partial.dtype)


def _split_k(problem: Problem, h: Array, leaves: dict[str, Array]) -> Partial:
    weight, early = _flat(problem, leaves), problem.early_weights
    return _shaped(problem, split_k_gemm.split_k_gemm(h, weight, early_weights=early))


def _norm_split_k(
    problem: Problem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
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


def _merge_split_k(problem: Problem, attention: Any, leaves: dict[str, Array]) -> Partial:
    weight, early = _flat(problem, leaves), problem.early_weights
    return split_k_gemm.merge_split_k_gemm(attention, weight, early_weights=early)


def _gated(problem: Problem, h: Array, leaves: dict[str, Array]) -> Array:
    return gate_up_gemm.gate_up_gemm(h, leaves["weight"], early_weights=problem.early_weights)


def _norm_gated(
    problem: Problem, x: Array, update: Any, weight: Array, leaves: dict[str, Array]
) -> tuple[Array, Array]:
    return gate_up_gemm.norm_gate_up_gemm(
        x, update, weight, problem.eps, leaves["weight"], early_weights=problem.early_weights
    )


def _add_rms_norm(problem: Problem, x: Array, update: Any, weight: Array) -> Any:
    return add_rms_norm.add_rms_norm(x, update, weight, problem.eps)


def _all_reduce(problem: Problem, update: Partial, peers: Peers) -> tuple[Array, Peers]:
    del problem
    return all_reduce_rms_norm.all_reduce(update, peers)


def _all_reduce_rms_norm(
    problem: Problem, x: Array, update: Partial, weight: Array, peers: Peers
) -> tuple[Array, Array, Peers]:
    return all_reduce_rms_norm.all_reduce_rms_norm(x, update, weight, problem.eps, peers)


def _all_reduce_argmax(problem: Problem, x: Array, peers: Peers) -> tuple[Array, Peers]:
    del problem
    return all_reduce_argmax.all_reduce_argmax(*local_argmax(x, TENSOR_AXIS), peers)


def _activation(problem: Problem, h: Array) -> Array:
    del problem
    return silu_and_mul.silu_and_mul(h)


def _rope_and_cache(problem: Problem, *operands: Any) -> Any:
    del problem
    qkv, *arrays, scales = operands
    if scales and isinstance(qkv, Partial):
        qkv = qkv.reduce()
    return rope_and_cache.rope_and_cache(qkv, *arrays, **scales)


def _norm_rope_and_cache(
    problem: Problem, qkv: Any, q_weight: Array, k_weight: Array, *operands: Any
) -> Any:
    *arrays, scales = operands
    if scales and isinstance(qkv, Partial):
        qkv = qkv.reduce()
    norms = rope_and_cache.HeadNorms(q_weight, k_weight, problem.eps)
    return rope_and_cache.rope_and_cache(qkv, *arrays, norms=norms, **scales)


def _route(
    problem: Problem, h: Array, weight: Array, bias: Array | None, correction: Array | None
) -> Routing:
    router, J, shape = problem.router, problem.width, (problem.rows, problem.depth, problem.width)
    assert router is not None
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
    problem: Problem,
    h: Array,
    chosen: Array,
    weights: Array,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Array | None,
    down_bias: Array | None,
) -> Partial:
    activation = problem.activation
    assert activation is not None
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


_WITHOUT_WEIGHTS = (
    "add_rms_norm",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_reduce_argmax",
    "activation",
)


def _kernel(name: str, operation: Operation, refusal: Any, run: Any) -> Kernel:
    streams = operation not in _WITHOUT_WEIGHTS and "cache" not in operation
    return Kernel(
        f"mosaic.{name}",
        operation,
        "mosaic",
        refusal,
        run,
        pads_rows=streams,
        gives_partial=name.endswith("split_k"),
        compute_capabilities=HOPPER,
    )


MOSAIC_KERNELS = (
    _kernel("split_k", "linear", _split_k_refusal, _split_k),
    _kernel("norm_split_k", "norm_linear", _norm_split_k_refusal, _norm_split_k),
    _kernel("merge_split_k", "merge_linear", _merge_split_k_refusal, _merge_split_k),
    _kernel("gate_up", "linear_activation", _gated_refusal, _gated),
    _kernel("norm_gate_up", "norm_linear_activation", _norm_gated_refusal, _norm_gated),
    _kernel("add_rms_norm", "add_rms_norm", _add_rms_norm_refusal, _add_rms_norm),
    _kernel("all_reduce", "all_reduce", _all_reduce_refusal, _all_reduce),
    _kernel(
        "all_reduce_rms_norm", "all_reduce_rms_norm", _all_reduce_refusal, _all_reduce_rms_norm
    ),
    _kernel(
        "all_reduce_argmax", "all_reduce_argmax", _all_reduce_argmax_refusal, _all_reduce_argmax
    ),
    _kernel("silu_and_mul", "activation", _activation_refusal, _activation),
    _kernel("rope_and_cache", "rope_and_cache", _rope_and_cache_refusal, _rope_and_cache),
    _kernel(
        "norm_rope_and_cache",
        "norm_rope_and_cache",
        _norm_rope_and_cache_refusal,
        _norm_rope_and_cache,
    ),
    _kernel("top_k_routing", "route", _route_refusal, _route),
    _kernel("grouped_gemm", "experts", _experts_refusal, _experts),
)
