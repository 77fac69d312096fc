"""Routing: the experts of each row and their weights, in float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from rjax.models.experts_config import Router


class Routing(NamedTuple):
    """The experts of each row, best first.

    Attributes:
        experts: their indices; the number of experts where a row takes none.
        weights: weights of their results.
    """

    experts: Int[Array, "T X"]
    weights: Float32[Array, "T X"]


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
