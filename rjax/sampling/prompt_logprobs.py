"""Log-probabilities of target tokens and of the most likely tokens, for samples and prompts."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

_GROUP = 64  # tokens whose maximum is taken first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at X positions with A alternatives each.

    Attributes:
        logprob: natural logarithm of the target token's probability.
        rank: 1 plus the number of tokens that are more likely than the target; 0 without a target.
        top_ids: the most likely tokens, best first; ties are in the order of their ids.
        top_logprobs: log-probabilities of ``top_ids``.
    """

    logprob: Float32[Array, " X"]
    rank: Int32[Array, " X"]
    top_ids: Int32[Array, "X A"]
    top_logprobs: Float32[Array, "X A"]


def token_logprobs(
    logits: Float32[Array, "X V"], targets: Int[Array, " X"], k: int
) -> TokenLogprobs:
    """Log-probability and rank of one target per position, and the ``k`` most likely tokens.

    The softmax is over the raw logits, before any sampling parameter. NaN counts as -inf. A target
    outside the vocabulary, such as -1 for no target, has logprob -inf and rank 0.

    Args:
        logits: raw logits of each position.
        targets: target token of each position; for prompt log-probabilities, the prompt's next
            token.
        k: number of alternatives A; static, 0 to V.
    """
    finite = jnp.finfo(jnp.float32)
    x = jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), finite.max)
    total = jax.nn.logsumexp(x, axis=-1)
    valid = (targets >= 0) & (targets < x.shape[-1])
    target = jnp.where(valid, targets, 0)[:, None]
    chosen = jnp.where(valid, jnp.take_along_axis(x, target, axis=-1)[:, 0], -jnp.inf)
    rank = jnp.where(valid, 1 + jnp.sum(x > chosen[:, None], axis=-1, dtype=jnp.int32), 0)
    values, ids = most_likely(x, k)
    return TokenLogprobs(
        logprob=_minus(chosen, total),
        rank=rank,
        top_ids=ids,
        top_logprobs=_minus(values, total[:, None]),
    )


def most_likely(
    x: Float32[Array, "X V"], k: int
) -> tuple[Float32[Array, "X A"], Int[Array, "X A"]]:
    """The ``k`` largest values of each row and their places, as `jax.lax.top_k` finds them.

    For more than 16, `jax.lax.top_k` sorts whole rows on a GPU. The first of equal values, and of
    equal maxima, precedes the others. The k largest values then lie in the k groups of neighbours
    with the largest maxima: an earlier group has at least one value that precedes all of a later
    one.
    """
    X, V = x.shape
    groups = -(-V // _GROUP)
    if not 0 < k < groups // 2:
        values, ids = jax.lax.top_k(x, k)
        return values, ids
    padded = jnp.pad(x, ((0, 0), (0, groups * _GROUP - V)), constant_values=-jnp.inf)
    grouped = padded.reshape(X, groups, _GROUP)
    _, best = jax.lax.top_k(grouped.max(axis=-1), k)
    best = jnp.sort(best, axis=-1)  # candidates in the order of their places
    candidates = jnp.take_along_axis(grouped, best[:, :, None], axis=1).reshape(X, k * _GROUP)
    values, places = jax.lax.top_k(candidates, k)
    group = jnp.take_along_axis(best, places // _GROUP, axis=-1)
    return values, group * _GROUP + places % _GROUP


def _minus(logits: Array, total: Array) -> Array:
    # If a whole row is -inf, ``total`` is -inf too and the difference would be NaN.
    return jnp.where(logits == -jnp.inf, -jnp.inf, logits - total)
