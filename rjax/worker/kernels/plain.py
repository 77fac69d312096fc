"""The operations in plain JAX, where XLA makes the kernels. They take every problem."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.models import Routing
from rjax.models.routing import route, router_logits
from rjax.models.schemes.grouped import dequantise_expert
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.add_rms_norm.xla import add_rms_norm
from rjax.pallas_kernels.all_reduce_argmax.xla import all_reduce_argmax
from rjax.pallas_kernels.all_reduce_rms_norm.xla import all_reduce
from rjax.pallas_kernels.grouped_gemm.xla import experts
from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.rope_and_cache.xla import rope_and_cache
from rjax.worker.kernels.kernel import Kernel
from rjax.worker.kernels.problem import Problem


def _linear(
    problem: Problem, h: Float[Array, "T D"], leaves: dict[str, Array]
) -> Float[Array, "T ..."] | Partial:
    assert problem.scheme is not None
    weight = problem.scheme.dequantise(leaves, problem.depth, h.dtype)
    weight = weight.reshape(problem.depth, *problem.columns)
    if not problem.needs_partial:
        return jnp.tensordot(h, weight, 1)
    product = jnp.tensordot(h, weight, 1, preferred_element_type=jnp.float32)
    return Partial(product[None], dtype=h.dtype)


def _add_rms_norm(problem: Problem, x: Any, update: Any, weight: Any) -> Any:
    return add_rms_norm(x, update, weight, problem.eps)


def _all_reduce(problem: Problem, update: Partial, peers: Any) -> Any:
    del problem
    return all_reduce(update, TENSOR_AXIS), peers


def _all_reduce_argmax(problem: Problem, x: Float[Array, "T W"], peers: Any) -> Any:
    del problem
    return all_reduce_argmax(x, TENSOR_AXIS), peers


def _activation(problem: Problem, h: Float[Array, "T A F"]) -> Float[Array, "T F"]:
    assert problem.activation is not None
    return problem.activation(h)


def _rope_and_cache(problem: Problem, *operands: Any) -> Any:
    del problem
    *arrays, scales = operands
    return rope_and_cache(*arrays, **scales)


def _route(problem: Problem, h: Any, weight: Any, bias: Any, correction: Any) -> Routing:
    assert problem.router is not None
    return route(router_logits(h, weight, bias), problem.router, problem.top_k, correction)


def _experts(
    problem: Problem,
    h: Any,
    chosen: Any,
    weights: Any,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Any,
    down_bias: Any,
) -> Partial:
    of_up, of_down = problem.scheme, problem.down_scheme
    assert problem.activation is not None and of_up is not None and of_down is not None
    if problem.needs_partial and down_bias is not None:
        down_bias = down_bias[0]
    return experts(
        h,
        chosen,
        weights,
        up,
        down,
        problem.activation,
        up_bias,
        down_bias,
        widen_up=lambda leaves: dequantise_expert(of_up, leaves, h.dtype),
        widen_down=lambda leaves: dequantise_expert(of_down, leaves, h.dtype),
        num_elsewhere=problem.experts_elsewhere,
    )


def _takes_all(problem: Problem) -> None:
    del problem


def _kernel(operation: Any, run: Any) -> Kernel:
    dequantises = operation in ("linear", "experts")
    return Kernel(f"xla.{operation}", operation, "xla", _takes_all, run, dequantises=dequantises)


PLAIN_KERNELS = (
    _kernel("linear", _linear),
    _kernel("add_rms_norm", _add_rms_norm),
    _kernel("all_reduce", _all_reduce),
    _kernel("all_reduce_argmax", _all_reduce_argmax),
    _kernel("activation", _activation),
    _kernel("rope_and_cache", _rope_and_cache),
    _kernel("route", _route),
    _kernel("experts", _experts),
)
"""Kernels that are used where no other kernel of a backend takes a problem."""
