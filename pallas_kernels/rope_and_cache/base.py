"""Rotary embedding and the scatter of new K and V into pages: the problem, and it in plain JAX."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.fp8 import Scales, check_scales, quantise
from rjax.pallas_kernels.kernel import Kernel, Problem, takes_all
from rjax.pallas_kernels.pending import Partial, reduced


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeAndCacheProblem(Problem):
    """The projections of queries, keys and values on their way into pages.

    Attributes:
        operation: the operands and the result of each:

            - rope_and_cache: (qkv, cos, sin, K pages, V pages, slots, scales) to (q, K pages,
              V pages);
            - norm_rope_and_cache: (qkv, weights of the norms of a query and a key, and as above).

        head_dim: numbers of a head.
        rotary_dim: how many of them rotate; None without rotation.
        kv_dtype: name of the dtype of the pages.
        eps: epsilon of the norms.
        norms_values: whether norm_rope_and_cache norms the values too, without a weight.
    """

    head_dim: int
    rotary_dim: int | None
    kv_dtype: str
    eps: float = 0.0
    norms_values: bool = False


def rotate(
    x: Float[Array, "T A H"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]
) -> Float[Array, "T A H"]:
    """Rotary position embedding (Su et al., 2021), in float32, on the first 2R of H dims.

    The two halves of the rotated dims pair up as in Hugging Face's Llama (x[i] with x[i + R]).
    """
    R = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    a, b, rest = x32[..., :R], x32[..., R : 2 * R], x32[..., 2 * R :]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x.dtype)


def write_kv(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    slots: Int[Array, " T"],
    *,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Put row t's K and V at token slot ``slots[t]`` = page * S + offset.

    A negative slot writes nothing. In place when the pages are donated. Pages in float8_e4m3fn
    hold value / scale (``fp8``), rounded to nearest and clipped to +-448. Their scales must be
    given, and must not change while a page holds tokens.

    Raises:
        ValueError: scales that do not match the pages.
    """
    check_scales(k_pages, v_pages, k_scales, v_scales)
    P, _, S, _ = k_pages.shape
    page = jnp.where(slots < 0, P, slots // S)
    offset = slots % S
    if k_scales is not None and v_scales is not None:
        k, v = quantise(k, k_scales, slots // S), quantise(v, v_scales, slots // S)
    k_pages = k_pages.at[page, :, offset].set(k.astype(k_pages.dtype), mode="drop")
    v_pages = v_pages.at[page, :, offset].set(v.astype(v_pages.dtype), mode="drop")
    return k_pages, v_pages


def rope_and_cache(
    qkv: Float[Array, "T K A H"] | Partial,
    cos: Float[Array, "T R"] | None,
    sin: Float[Array, "T R"] | None,
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    slots: Int[Array, " T"],
    *,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "P K S H"], Float[Array, "P K S H"]]:
    """Rotate q and k (``rotate``) and write k and v into pages (``write_kv``).

    ``qkv`` has A - 2 queries, a key and a value for each KV head. Without cos and sin nothing is
    rotated. Scales as in ``write_kv``. Returns (q with N = K (A - 2), k_pages, v_pages).
    """
    q, k, v = split_qkv(reduced(qkv))
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, *write_kv(k, v, k_pages, v_pages, slots, k_scales=k_scales, v_scales=v_scales)


def split_qkv(
    qkv: Float[Array, "T K A H"],
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """(q, k, v) of fused projections with A - 2 queries, a key and a value for each KV head."""
    T, K, A, H = qkv.shape
    return qkv[:, :, :-2].reshape(T, K * (A - 2), H), qkv[:, :, -2], qkv[:, :, -1]


def _run(problem: RopeAndCacheProblem, *operands: Any) -> Any:
    del problem
    *arrays, scales = operands
    return rope_and_cache(*arrays, **scales)


PLAIN_KERNEL = Kernel("xla.rope_and_cache", "rope_and_cache", "xla", takes_all, _run)
