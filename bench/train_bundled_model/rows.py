"""Extra losses that teach the middle layers which tokens share a row; training alone has them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rjax.models.config import ModelConfig

ROWS = 64  # classes of the rows' ordinals, and width of the other projections


def mean(values: Array, mask: Array) -> Array:
    """Mean of the values where the mask is true; 0 where it is nowhere."""
    return jnp.sum(values * mask) / jnp.maximum(jnp.sum(mask), 1)


def fresh_pointers(config: ModelConfig, seed: int) -> dict[str, Array]:
    """Projections of `row_losses`, [D, ROWS] each; they serve training alone."""
    names = ("row_query", "row_key", "pointer_query", "pointer_key", "ordinal")
    keys = jax.random.split(jax.random.key(seed), len(names))
    D = config.hidden_size
    return {
        name: D**-0.5 * jax.random.normal(key, (D, ROWS), jnp.float32)
        for name, key in zip(names, keys, strict=True)
    }


def row_losses(
    pointers: dict[str, Array], stream: list[Array], batch: dict[str, Array], newline: int
) -> dict[str, Array]:
    """Losses that teach the middle layers which tokens share a row, by name.

    A cell before the name in its row can be found only by a feature that both have in common.
    Next-token prediction does not reward learning such a feature, and without these losses training
    stalls for long. At half depth, every table token must recognise the tokens of its own row
    (``row``) and predict the number of that row (``ordinal``). At two thirds, the token before each
    answer token must recognise the row that the answer token is taken from (``pointer``). ``row``
    and ``pointer`` are -log of the attention that the right row gets from one dot-product
    attention.
    """
    P = batch["prefix"].shape[1]
    is_newline = batch["prefix"] == newline
    line = jnp.cumsum(is_newline, 1) - is_newline
    real = jnp.arange(P) < batch["lengths"][:, None]

    def normed(at: int) -> Array:
        x = stream[at].astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)
        return x.astype(stream[at].dtype)

    def attention(kind: str, at: int, queries: slice, wanted: Array) -> Array:
        x = normed(at)
        q = jnp.einsum("BTD,DH->BTH", x[:, queries], pointers[f"{kind}_query"].astype(x.dtype))
        k = jnp.einsum("BPD,DH->BPH", x[:, :P], pointers[f"{kind}_key"].astype(x.dtype))
        scores = jnp.einsum("BTH,BPH->BTP", q, k, preferred_element_type=jnp.float32) / 8
        scores = jnp.where(real[:, None], scores, -1e30)
        right = jnp.where(wanted[..., None] == line[:, None], scores, -1e30)
        return jax.nn.logsumexp(scores, -1) - jax.nn.logsumexp(right, -1)

    L = len(stream)
    some = slice(P % 13, P, 13)  # a thirteenth of the tokens is enough
    row = line - batch["first_lines"][:, None]
    ordinals = jnp.einsum(
        "BTD,DR->BTR", normed(L // 2 - 1)[:, some], pointers["ordinal"].astype(stream[0].dtype)
    ).astype(jnp.float32)
    numbered = -jnp.take_along_axis(
        jax.nn.log_softmax(ordinals), jnp.clip(row[:, some], 0, ROWS - 1)[..., None], -1
    )[..., 0]
    rows = attention("row", L // 2 - 1, some, line[:, some])
    pointed = attention("pointer", 2 * L // 3, slice(P, None), batch["lines"].astype(jnp.int32))
    return {
        "row": mean(rows, real[:, some]),
        "pointer": mean(pointed, batch["lines"] > 0),
        "ordinal": mean(numbered, real[:, some] & (row[:, some] >= 0)),
    }
