"""The fused rotary and KV write against the plain functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.pending import Partial, reduced
from rjax.pallas_kernels.rope_and_cache import base as xla
from rjax.pallas_kernels.rope_and_cache import mosaic

# (T, G, K, H, R, S, whether there is a bias)
SHAPES = [
    (5, 4, 8, 128, 64, 64, False),
    (3, 7, 2, 64, 32, 16, True),
    (4, 8, 1, 80, 16, 32, True),
    (1, 1, 6, 64, 32, 64, False),
    (6, 1, 4, 192, 32, 64, False),  # latent attention: a third of the dims rotates
    (7, 8, 2, 512, 256, 64, False),
]
NORMED = [SHAPES[0], SHAPES[1], SHAPES[3], (9, 2, 3, 256, 128, 64, True), SHAPES[5]]


def make(shape, dtype=jnp.bfloat16) -> tuple[Any, ...]:
    T, G, K, H, R, S, biased = shape
    rng = np.random.default_rng(3)

    def normal(*size, kind=dtype):
        return jnp.asarray(rng.standard_normal(size, np.float32), kind)

    slots = rng.permutation(6 * S)[:T].astype(np.int32)
    if T > 1:
        slots[-1] = -1
    qkv, bias = normal(T, K, G + 2, H), normal(K, G + 2, H)
    return (
        Partial(qkv[None].astype(jnp.float32), bias, dtype) if biased else qkv,
        normal(T, R, kind=jnp.float32),
        normal(T, R, kind=jnp.float32),
        normal(6, K, S, H),
        normal(6, K, S, H),
        jnp.asarray(slots),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain(shape):
    *_, k_pages, v_pages, slots = args = make(shape)
    want_q, want_k, want_v = xla.rope_and_cache(*args)
    got_q, got_k, got_v = jax.jit(mosaic.rope_and_cache)(*args)
    for got, want in ((got_q, want_q), (got_k, want_k), (got_v, want_v)):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-2
        )
    untouched = np.ones(6 * shape[5], bool)
    untouched[np.asarray(slots)[np.asarray(slots) >= 0]] = False
    untouched = untouched.reshape(6, shape[5])
    for got, before in ((got_k, k_pages), (got_v, v_pages)):
        got, before = (np.asarray(x, np.float32).swapaxes(1, 2) for x in (got, before))
        np.testing.assert_array_equal(got[untouched], before[untouched])


def norms_of(H: int, values: bool = False) -> mosaic.HeadNorms:
    weights = np.random.default_rng(5).uniform(0.5, 1.5, (2, H)).astype(np.float32)
    return mosaic.HeadNorms(
        jnp.asarray(weights[0], jnp.bfloat16), jnp.asarray(weights[1]), 1e-6, values
    )


def normed(qkv, norms: mosaic.HeadNorms):
    """The queries and keys of the projections normed, and perhaps values, in plain JAX."""
    heads = reduced(qkv)
    x = heads.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + norms.eps)
    q = x[:, :, :-2] * norms.q_weight.astype(jnp.float32)
    k = x[:, :, -2:-1] * norms.k_weight.astype(jnp.float32)
    v = x[:, :, -1:].astype(heads.dtype) if norms.values else heads[:, :, -1:]
    return jnp.concatenate([q.astype(heads.dtype), k.astype(heads.dtype), v], 2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("shape", NORMED)
def test_norms_against_plain(shape, values):
    qkv, *rest = make(shape)
    norms = norms_of(shape[3], values)
    want = xla.rope_and_cache(normed(qkv, norms), *rest)
    got = jax.jit(lambda *args: mosaic.rope_and_cache(*args, norms=norms))(qkv, *rest)
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("shape", NORMED)
def test_norms_lower_for_cuda(shape, values):
    run = lambda *args: mosaic.rope_and_cache(*args, norms=norms_of(shape[3], values))  # noqa: E731
    traced = jax.jit(run).trace(*make(shape))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_norms_that_are_refused():
    assert mosaic.norm_refusal(128, 128) is None
    assert "64 rotated dims of 128" in mosaic.norm_refusal(128, 64)
    assert "heads of 80 dims take 5 threads" in mosaic.norm_refusal(80, 80)
    with pytest.raises(ValueError, match="32 rotated dims of 80"):
        mosaic.rope_and_cache(*make(SHAPES[2]), norms=norms_of(80))


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_is_its_parts(shape):
    qkv, cos, sin, k_pages, v_pages, slots = make(shape, jnp.float32)
    q, new_k, new_v = xla.rope_and_cache(qkv, cos, sin, k_pages, v_pages, slots)
    whole = reduced(qkv)
    T, K, A, H = qkv.shape
    for head in range(K * (A - 2)):
        one = whole[:, head // (A - 2), head % (A - 2)][:, None]
        np.testing.assert_allclose(q[:, head], xla.rotate(one, cos, sin)[:, 0], rtol=1e-6)
    S = k_pages.shape[2]
    for row, slot in enumerate(np.asarray(slots)):
        if slot >= 0:
            np.testing.assert_array_equal(new_v[slot // S, :, slot % S], whole[row, :, -1])
    unrotated, *_ = xla.rope_and_cache(qkv, None, None, k_pages, v_pages, slots)
    np.testing.assert_array_equal(unrotated, whole[:, :, :-2].reshape(T, K * (A - 2), H))


@pytest.mark.parametrize("shape", SHAPES)
def test_lowers_for_cuda(shape):
    traced = jax.jit(mosaic.rope_and_cache).trace(*make(shape))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def with_fp8_pages(shape, per_page) -> tuple[tuple[Any, ...], jax.Array]:
    """The arguments of ``make``, and scales."""
    qkv, *args, k_pages, v_pages, slots = make(shape)
    k_pages, v_pages = (x.astype(jnp.float8_e4m3fn) for x in (k_pages, v_pages))
    size = (6, shape[2]) if per_page else (shape[2],)
    scales = np.random.default_rng(4).uniform(0.02, 0.1, (2, *size)).astype(np.float32)
    return (reduced(qkv), *args, k_pages, v_pages, slots), jnp.asarray(scales)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("shape", "per_page"), [(SHAPES[1], False), (SHAPES[2], True)])
def test_fp8_pages_against_plain(shape, per_page):
    """Plain keys are rounded to the queries' dtype first: some end one step of fp8 away."""
    args, (k_scales, v_scales) = with_fp8_pages(shape, per_page)
    scales = dict(k_scales=k_scales, v_scales=v_scales)
    want = xla.rope_and_cache(*args, **scales)
    got = jax.jit(mosaic.rope_and_cache)(*args, **scales)
    for pool, plain, before, share in zip(got[1:], want[1:], args[3:5], (0.1, 0.01), strict=True):
        assert pool.dtype == jnp.float8_e4m3fn
        pool, plain, before = (np.asarray(x, np.float32) for x in (pool, plain, before))
        np.testing.assert_allclose(pool, plain, rtol=0.13, atol=2**-9)
        assert (pool != plain).sum() <= share * (plain != before).sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("per_page", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_pages_lower_for_cuda(shape, per_page):
    args, (k_scales, v_scales) = with_fp8_pages(shape, per_page)
    run = lambda *args: mosaic.rope_and_cache(*args, k_scales=k_scales, v_scales=v_scales)  # noqa: E731
    traced = jax.jit(run).trace(*args)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals():
    args = list(make(SHAPES[0]))
    args[0] = args[0].astype(jnp.float32)
    with pytest.raises(ValueError, match="16-bit"):
        mosaic.rope_and_cache(*args)
    args = list(make(SHAPES[0]))
    args[1] = args[2] = jnp.ones((5, 65), jnp.float32)
    with pytest.raises(ValueError, match="130 rotated dims"):
        mosaic.rope_and_cache(*args)
    args, _ = with_fp8_pages(SHAPES[0], per_page=False)
    with pytest.raises(ValueError, match="give k_scales"):
        mosaic.rope_and_cache(*args)
