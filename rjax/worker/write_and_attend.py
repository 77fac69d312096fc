"""Norm, rotation, write of KV and attention of a step, as one jitted function."""

import functools

import jax
import jax.numpy as jnp

from rjax.models import KvScales
from rjax.pallas_kernels.attention.backend import AttentionBackend
from rjax.pallas_kernels.kernel import Kernel, Problem


@functools.partial(jax.jit, static_argnames=("write", "problem", "backend", "spec", "unmerged"))
def write_and_attend(
    qkv,
    k_pages,
    v_pages,
    rotary,
    kv_scales,
    heads,
    norm_weights,
    view,
    plan,
    *,
    write: Kernel,
    problem: Problem,
    backend: AttentionBackend,
    spec,
    unmerged: bool,
):
    """(attention of the rows, K pages, V pages); jitted by itself, as `run_kernel` is.

    Args:
        qkv, rotary, spec, kv_scales, heads: the arguments of ``PagedOperations.attention``.
        k_pages, v_pages: the layer's pools, [P, K, S, H]; the rows' keys and values are written
            first. Where a page has several layers, the pools are taken as pages of one layer each.
        norm_weights: operands of ``write`` behind qkv: the norms' weights, or nothing.
        view, plan: the rows in the layer's page group, and the work list of the attention.
        write: kernel that norms, rotates and stores, of ``problem``.
        backend: the attention backend.
        unmerged: leave the splits of the KV to the kernel that follows.
    """
    of_pools, (_, K, _, H) = k_pages.shape, qkv.shape
    k_pages, v_pages = (pool.reshape(-1, K, of_pools[2], H) for pool in (k_pages, v_pages))
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    scales = {}
    if k_pages.dtype == jnp.float8_e4m3fn:
        found = kv_scales or KvScales(jnp.ones(1, jnp.float32), jnp.ones(1, jnp.float32))
        kv_heads = k_pages.shape[1:2]
        scales = {
            "k_scales": jnp.broadcast_to(found.k, kv_heads),
            "v_scales": jnp.broadcast_to(found.v, kv_heads),
        }
    operands = *norm_weights, cos, sin, k_pages, v_pages, view.kv_slots, scales
    written = write.run(problem, qkv, *operands)
    pools = [pool.reshape(of_pools) for pool in written[1:]]
    operands = *written, view.page_table, view.positions, plan, spec
    if unmerged:
        assert backend.unmerged_attention is not None
        return backend.unmerged_attention(*operands, **scales), *pools
    options = scales
    if heads is not None:
        options = options | {"sinks": heads.sinks, "alibi_slopes": heads.alibi_slopes}
    out, _ = backend.attention(*operands, **options)
    return out, *pools
