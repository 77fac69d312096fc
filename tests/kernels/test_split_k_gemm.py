"""The split-K GEMM, and the kernels that reduce their partials."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gemm import base, split_k_gemm
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual import add_rms_norm as mosaic_norm
from rjax.pallas_kernels.residual import base as xla_norm
from rjax.pallas_kernels.rope_and_cache import base as xla_write
from rjax.pallas_kernels.rope_and_cache import mosaic as mosaic_write

# (T, depth, columns): of Llama-3-8B, Qwen2.5-3B, Qwen2.5-0.5B
SHAPES = [
    (64, 4096, 6144),
    (128, 4096, 6144),
    (64, 14336, 4096),
    (8, 4096, 4096),
    (32, 11008, 2048),
    (64, 2048, 2560),
    (128, 2048, 2560),
    (16, 896, 1152),
    (16, 4864, 896),
]


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def test_summands_add_up():
    h, w = normal(5, 96, dtype=jnp.float32), normal(96, 24, dtype=jnp.float32, seed=1)
    partial = base.split_k_gemm(h, w, 4)
    assert partial.summands.shape == (4, 5, 24) and partial.shape == (5, 24)
    np.testing.assert_allclose(partial.reduce(), h @ w, rtol=1e-4, atol=1e-4)
    second = partial.summands[1]
    np.testing.assert_allclose(second, h[:, 24:48] @ w[24:48], rtol=1e-4, atol=1e-4)


def test_a_sum_is_rounded_before_its_bias_is_added():
    partial = Partial(normal(3, 5, 24, dtype=jnp.float32), normal(24, seed=1))
    want = partial.summands.sum(0).astype(jnp.bfloat16) + partial.bias
    np.testing.assert_array_equal(partial.reduce(), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_plain_consumers_reduce(dtype):
    partial = Partial(normal(3, 5, 96, dtype=jnp.float32), dtype=dtype)
    x, weight = normal(5, 96, dtype=dtype, seed=1), normal(96, dtype=dtype, seed=2)
    got = xla_norm.add_rms_norm(x, partial, weight, 1e-5)
    want = xla_norm.add_rms_norm(x, partial.reduce(), weight, 1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    qkv, *rest = written(partial.summands.reshape(3, 5, 2, 3, 16), dtype)
    got, want = (xla_write.rope_and_cache(x, *rest) for x in (qkv, qkv.reduce()))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def written(summands, dtype, page_size=16):
    """Arguments of ``rope_and_cache`` for a Partial with a bias."""
    _, T, K, A, H = summands.shape
    rotary = [normal(T, H // 2, dtype=jnp.float32, seed=i) for i in (3, 4)]
    pages = [normal(4, K, page_size, H, dtype=dtype, seed=i) for i in (5, 6)]
    slots = jnp.asarray(np.random.default_rng(7).permutation(4 * page_size)[:T].astype(np.int32))
    qkv = Partial(summands, normal(K, A, H, dtype=dtype, seed=8), dtype)
    return qkv, *rotary, *pages, slots


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_lower(shape):
    T, depth, columns = shape
    h, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, depth), (depth, columns)))
    traced = jax.jit(split_k_gemm.split_k_gemm).trace(h, w)
    traced.lower(lowering_platforms=("cuda",))
    [parts] = jax.tree.leaves(traced.out_info)
    assert parts.dtype == jnp.float32 and parts.shape[1:] == (T, columns)
    # Enough CTAs to keep the memory busy.
    assert parts.shape[0] * columns // 64 >= 48


def test_consumers_of_partials_lower():
    partial = Partial(normal(4, 8, 1024, dtype=jnp.float32))
    x, weight = normal(8, 1024), normal(1024)
    traced = jax.jit(mosaic_norm.add_rms_norm, static_argnums=3).trace(x, partial, weight, 1e-5)
    traced.lower(lowering_platforms=("cuda",))
    arguments = written(normal(2, 8, 2, 4, 64, dtype=jnp.float32), jnp.bfloat16)
    traced = jax.jit(mosaic_write.rope_and_cache).trace(*arguments)
    traced.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("h", "w", "found"),
    [
        (normal(7, 128), normal(128, 128), "7 rows"),
        (normal(8, 96), normal(96, 128), "96 x 128"),
        (normal(8, 128), normal(128, 96), "128 x 96"),
        (normal(8, 128), normal(128, 128, dtype=jnp.float16), "float16"),
        (normal(8, 128, dtype=jnp.float32), normal(128, 128, dtype=jnp.float32), "float32"),
    ],
)
def test_what_the_kernel_does_not_take(h, w, found):
    with pytest.raises(ValueError, match=found):
        split_k_gemm.split_k_gemm(h, w)


def test_partials_that_the_consumers_do_not_take():
    partial = Partial(normal(2, 8, 256, dtype=jnp.float32), normal(256))
    with pytest.raises(ValueError, match="pending bias"):
        mosaic_norm.add_rms_norm(normal(8, 256), partial, normal(256), 1e-5)
    half = Partial(partial.summands, dtype=jnp.float16)
    with pytest.raises(ValueError, match="update float16"):
        mosaic_norm.add_rms_norm(normal(8, 256), half, normal(256), 1e-5)
    qkv, *rest = written(normal(2, 8, 2, 4, 64, dtype=jnp.float32), jnp.float16)
    with pytest.raises(ValueError, match="qkv is bfloat16 and the pages are float16"):
        mosaic_write.rope_and_cache(Partial(qkv.summands), *rest)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float32(shape):
    T, depth, columns = shape
    h, w = normal(T, depth), normal(depth, columns, seed=1)
    run = jax.jit(split_k_gemm.split_k_gemm)
    first, again = run(h, w), run(h, w)
    np.testing.assert_array_equal(first.summands, again.summands)
    with jax.default_matmul_precision("highest"):
        want = np.asarray(h.astype(jnp.float32) @ w.astype(jnp.float32))
    found = np.asarray(first.summands).sum(0)
    error = np.linalg.norm(found - want) / np.linalg.norm(want)
    assert error < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("X", "T", "D"), [(4, 64, 4096), (8, 16, 896), (1, 8, 2048)])
def test_norm_of_a_partial(X, T, D):
    x, weight = normal(T, D), normal(D, seed=2)
    partial = Partial(normal(X, T, D, dtype=jnp.float32, seed=1))
    got = jax.jit(mosaic_norm.add_rms_norm, static_argnums=3)(x, partial, weight, 1e-5)
    want = xla_norm.add_rms_norm(x, partial, weight, 1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-2
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [(2, 64, 8, 6, 128), (7, 16, 2, 9, 64)])
def test_write_of_a_partial(shape):
    arguments = written(normal(*shape, dtype=jnp.float32), jnp.bfloat16, page_size=64)
    got = jax.jit(mosaic_write.rope_and_cache)(*arguments)
    for a, b in zip(got, xla_write.rope_and_cache(*arguments), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=2e-2
        )
