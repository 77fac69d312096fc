"""Experts and their router in plain JAX."""

from typing import Any

from jaxtyping import Array

from rjax.models import Routing
from rjax.models.routing import route, router_logits
from rjax.pallas_kernels.grouped_gemm.xla import experts
from rjax.pallas_kernels.kernel import Kernel, takes_all
from rjax.pallas_kernels.partial import Partial
from rjax.worker.kernels.experts_problem import ExpertsProblem, RouteProblem


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

    def widen_up(leaves: dict[str, Array]) -> Array:
        weight = problem.scheme.dequantise(leaves, problem.depth, h.dtype)
        return weight.reshape(problem.depth, *problem.columns)

    def widen_down(leaves: dict[str, Array]) -> Array:
        return problem.down_scheme.dequantise(leaves, problem.columns[-1], h.dtype)

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
        widen_up=widen_up,
        widen_down=widen_down,
        num_elsewhere=problem.experts_elsewhere,
    )


PLAIN_KERNELS = (
    Kernel("xla.route", "route", "xla", takes_all, _route),
    Kernel("xla.experts", "experts", "xla", takes_all, _experts, dequantises=True),
)
