"""The operations in plain JAX, where XLA makes the kernels. They take every problem."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.models import Routing
from rjax.models.routing import route, router_logits
from rjax.models.schemes.grouped import dequantise_expert
from rjax.pallas_kernels.grouped_gemm.xla import experts
from rjax.pallas_kernels.kernel import Kernel, takes_all
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.experts_problem import ExpertsProblem, RouteProblem
from rjax.worker.kernels.linear_problem import LinearProblem


def _linear(
    problem: LinearProblem, h: Float[Array, "T D"], leaves: dict[str, Array]
) -> Float[Array, "T ..."] | Partial:
    assert problem.scheme is not None
    weight = problem.scheme.dequantise(leaves, problem.depth, h.dtype)
    weight = weight.reshape(problem.depth, *problem.columns)
    if not problem.needs_partial:
        return jnp.tensordot(h, weight, 1)
    product = jnp.tensordot(h, weight, 1, preferred_element_type=jnp.float32)
    return Partial(product[None], dtype=h.dtype)


def _activation(problem: LinearProblem, h: Float[Array, "T A F"]) -> Float[Array, "T F"]:
    assert problem.activation is not None
    return problem.activation(h)


def _route(problem: RouteProblem, h: Any, weight: Any, bias: Any, correction: Any) -> Routing:
    return route(router_logits(h, weight, bias), problem.router, problem.top_k, correction)


def _experts(
    problem: ExpertsProblem,
    h: Any,
    chosen: Any,
    weights: Any,
    up: dict[str, Array],
    down: dict[str, Array],
    up_bias: Any,
    down_bias: Any,
) -> Partial:
    of_up, of_down = problem.scheme, problem.down_scheme
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


def _kernel(operation: Any, run: Any) -> Kernel:
    dequantises = operation in ("linear", "experts")
    return Kernel(f"xla.{operation}", operation, "xla", takes_all, run, dequantises=dequantises)


PLAIN_KERNELS = (
    _kernel("linear", _linear),
    _kernel("activation", _activation),
    _kernel("route", _route),
    _kernel("experts", _experts),
)
"""Kernels that are used where no other kernel of a backend takes a problem."""
