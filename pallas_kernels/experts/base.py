"""Experts and their router: the problems, and each operation in plain JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.experts.work_list import WorkList, make_work_list
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.kernel import Kernel, Problem, takes_all
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.weight import ScaledLayout, WeightStorage

type _Activation = Callable[[Float[Array, "R A I"]], Float[Array, "R I"]]
type _Widen = Callable[[Any], Float[Array, "E ..."]]


@dataclasses.dataclass(frozen=True, slots=True)
class Router:
    """How a router scores the experts of a row and weighs the chosen ones.

    The k best experts are chosen; the expert with the lower index wins among equal scores.

    Attributes:
        score: "softmax" over all experts, "sigmoid" of each, or "softmax_of_topk": the logits
            choose, and the softmax is over the chosen ones.
        renormalise: divide the weights of a row by their sum.
        scale: factor of the weights, after that.
        bias: whether the router's projection has a bias.
        correction_bias: whether a bias is added to the scores for the choice only.
        num_groups: groups of neighbouring experts; a row chooses in its ``top_groups`` best.
        top_groups: a group counts as much as its ``group_best`` best experts together.
        group_best: see above; DeepSeek-V2 has 1, DeepSeek-V3 and GLM 2.
    """

    score: Literal["softmax", "sigmoid", "softmax_of_topk"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    bias: bool = False
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2


class Routing(NamedTuple):
    """The experts of each row, best first.

    Attributes:
        experts: their indices; the number of experts where a row takes none.
        weights: weights of their results.
    """

    experts: Int[Array, "T X"]
    weights: Float32[Array, "T X"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouteProblem(Problem):
    """The choice of the experts of each row.

    route: (h [T, D], weight [D, J], bias [J] or None, correction [J] or None) to Routing.

    Attributes:
        depth: D.
        num_experts, top_k: J of all devices, and the experts of a row.
        router: the scoring and choice of experts.
    """

    depth: int
    num_experts: int
    top_k: int
    router: Router


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsProblem(Problem):
    """The weighted sum of the outputs of each row's experts; see `Operations.experts`.

    experts: (h [T, D], experts of each row, their weights, the leaves of the weights [J, D, A, I]
    and [J, I, D] of all experts, their biases or None, the second's with an axis of one device
    before it if ``needs_partial``) to a Partial.

    Attributes:
        depth: D.
        columns: (A, I) of one device.
        scheme, layout: see `LinearProblem`, of the first weight.
        down_scheme, down_layout: the same of the second.
        activation: activation between the two products.
        needs_partial: the devices have shares of the result, so that it must be a Partial.
        experts_elsewhere: experts of the other devices, where devices hold whole experts. Rows may
            then have any number of the device's own, also none.
    """

    depth: int
    columns: tuple[int, int]
    scheme: WeightStorage
    layout: ScaledLayout | None
    down_scheme: WeightStorage
    down_layout: ScaledLayout | None
    activation: Activation
    needs_partial: bool
    experts_elsewhere: int

    @property
    def schemes(self) -> tuple[WeightStorage, ...]:
        """The schemes of both weights."""
        return self.scheme, self.down_scheme


def router_logits(
    h: Float[Array, "T D"], weight: Float[Array, "D J"], bias: Float[Array, " J"] | None
) -> Float32[Array, "T J"]:
    """h @ weight + bias."""
    logits = jnp.dot(h, weight, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def route(
    logits: Float32[Array, "T J"],
    router: Router,
    top_k: int,
    correction: Float[Array, " J"] | None = None,
) -> Routing:
    """Choose ``top_k`` experts for each row; the lower index wins among equal scores.

    Args:
        logits: the result of the router's projection.
        router: how it chooses.
        top_k: X.
        correction: the bias of the scores for the choice.
    """
    if router.score == "softmax_of_topk":
        best, experts = jax.lax.top_k(logits, top_k)
        return Routing(experts, jax.nn.softmax(best, axis=-1) * router.scale)
    scores = jax.nn.sigmoid(logits) if router.score == "sigmoid" else jax.nn.softmax(logits)
    choice = scores if correction is None else scores + correction.astype(jnp.float32)
    if router.num_groups > 1:
        choice = _best_groups(choice, router)
    _, experts = jax.lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if router.renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights * router.scale)


def _best_groups(choice: Float32[Array, "T J"], router: Router) -> Float32[Array, "T J"]:
    """The scores in the best groups of each row; -inf in the others."""
    T, J = choice.shape
    groups = choice.reshape(T, router.num_groups, -1)
    of_group = jax.lax.top_k(groups, router.group_best)[0].sum(-1)
    _, best = jax.lax.top_k(of_group, router.top_groups)
    chosen = (jnp.arange(router.num_groups) == best[:, :, None]).any(1)
    return jnp.where(chosen[:, :, None], groups, -jnp.inf).reshape(T, J)


def experts(
    h: Float[Array, "T D"],
    chosen: Int[Array, "T X"],
    weights: Float32[Array, "T X"],
    up: Any,
    down: Any,
    activation: _Activation,
    up_bias: Float[Array, "J A I"] | None = None,
    down_bias: Float[Array, "J D"] | None = None,
    *,
    widen_up: _Widen = lambda up: up,
    widen_down: _Widen = lambda down: down,
    differentiable: bool = False,
    num_elsewhere: int = 0,
) -> Partial:
    """The sum over the chosen experts of weight * down(activation(up(h))), as one summand.

    Products and the sum are float32, the sum in the order of ``chosen``; the activated row is
    rounded to h's dtype. The result of a row does not depend on other rows.

    Args:
        h: rows.
        chosen: the experts of each row; J for none.
        weights: weights of the chosen experts' results.
        up, down: weights of all experts, [J, D, A, I] and [J, I, D]; or what is stored of them,
            arrays with J first.
        activation: function of the float32 products that gives the activated rows.
        up_bias, down_bias: biases of all experts, or None.
        widen_up, widen_down: functions from what is stored of one expert to its weight [D, A, I] or
            [I, D].
        differentiable: compute all tiles, also those without rows, so that gradients can be taken.
        num_elsewhere: experts of other devices, which compute the rest of the sum.
    """
    T, D = h.shape
    num_experts = jax.tree.leaves(up)[0].shape[0]
    work = make_work_list(chosen, num_experts, num_elsewhere=num_elsewhere)
    R = work.tile_rows
    rows = h[work.slot_row]

    def tile(i: Array) -> Float32[Array, "R D"]:
        expert = work.tile_expert[i]
        own = lax.dynamic_slice(rows, (i * R, 0), (R, D))
        of_up = widen_up(_of_expert(up, expert))
        both = _dot(own, of_up.reshape(D, -1)).reshape(R, *of_up.shape[1:])
        if up_bias is not None:
            both = both + lax.dynamic_index_in_dim(up_bias, expert, keepdims=False)
        hidden = activation(both).astype(h.dtype)
        result = _dot(hidden, widen_down(_of_expert(down, expert)))
        if down_bias is not None:
            result = result + lax.dynamic_index_in_dim(down_bias, expert, keepdims=False)
        return result

    def store(i: Array, out: Float32[Array, "S D"]) -> Float32[Array, "S D"]:
        return lax.dynamic_update_slice(out, tile(i), (i * R, 0))

    if differentiable:
        out = lax.map(tile, jnp.arange(work.tile_expert.shape[0])).reshape(-1, D)
    else:
        out = lax.fori_loop(0, _trips(work), store, jnp.zeros((len(rows), D), jnp.float32))
    # Pairs without an expert add zeros.
    each = jnp.take(out, work.pair_slot, axis=0, mode="fill", fill_value=0)
    total = jnp.zeros((T, D), jnp.float32)
    for i in range(chosen.shape[1]):
        total = total + weights[:, i, None] * each[:, i]
    return Partial(total[None], dtype=h.dtype)


def _of_expert(arrays: Any, expert: Array) -> Any:
    return jax.tree.map(
        lambda array: lax.dynamic_index_in_dim(array, expert, keepdims=False), arrays
    )


def _dot(a: Float[Array, "R D"], b: Float[Array, "D F"]) -> Float32[Array, "R F"]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _trips(work: WorkList) -> Int[Array, ""]:
    """Tiles to compute: those with rows on the CPU; elsewhere all, so that no host waits."""
    most = work.tile_expert.shape[0]
    return jax.lax.platform_dependent(
        work.num_tiles[0], cpu=lambda n: n, default=lambda n: jnp.full_like(n, most)
    )


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
