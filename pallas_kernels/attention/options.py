"""Checks of arguments and attention sinks, the same for every backend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan


def check_per_head(heads: int, **options: Float[Array, " N"] | None) -> None:
    """Raise ValueError unless each given option holds one float32 a query head."""
    for name, value in options.items():
        if value is not None and (value.shape != (heads,) or value.dtype != jnp.float32):
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; "
                f"it must be float32[{heads}], one number a query head"
            )


def check_shapes(q: Array, k_pages: Array, v_pages: Array, plan: AttentionPlan) -> None:
    """Raise ValueError unless queries, pages and plan fit each other."""
    (T, N, H), (_, K, S, pages_h) = q.shape, k_pages.shape
    if k_pages.shape != v_pages.shape or pages_h != H:
        raise ValueError(
            f"k_pages are {list(k_pages.shape)}, v_pages {list(v_pages.shape)}; both must be "
            f"[P, K, S, {H}] as q's head dim is {H}"
        )
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} KV heads")
    if plan.merge_indptr.shape[0] != T + 1:
        raise ValueError(f"the plan is for {plan.merge_indptr.shape[0] - 1} rows; q has {T}")
    for work in plan.lists:
        if work.tile_tokens % S:
            raise ValueError(
                f"the plan is split at {work.tile_tokens} tokens; with pages of {S} it must be "
                f"split at a multiple of {S}"
            )


def apply_sinks(
    out: Float[Array, "T N H"], lse: Float[Array, "T N"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Add each head's sink, a logit without a value, to the softmax of each row.

    It adds exp(sinks[n]) to the denominator once a row: call it on the merged result, not on
    partial results, and do not merge its result further. A row that sees nothing stays 0 and -inf.
    Source: the learned sinks of gpt-oss (OpenAI, 2025).
    """
    with_sink = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, sinks))
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(out.dtype), with_sink
