"""The elementwise kernels of a layer: add_rms_norm and silu_and_mul."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gemm import activation as xla_activation
from rjax.pallas_kernels.gemm import silu_and_mul as mosaic_activation
from rjax.pallas_kernels.residual import add_rms_norm as mosaic_norm
from rjax.pallas_kernels.residual import base as xla_norm

NORMS = [(64, 4096), (1, 4096), (16, 896), (70, 384)]
ACTIVATIONS = [(64, 14336), (1, 14336), (16, 4864), (5, 1024), (3, 136)]


def normal(*shape, dtype=jnp.bfloat16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def norm_arguments(T, D, dtype=jnp.bfloat16):
    return normal(T, D, dtype=dtype), normal(T, D, dtype=dtype, seed=1), normal(D, dtype=dtype)


def f32(x):
    return np.asarray(x, np.float32)


def test_plain_norm():
    x, update, weight = norm_arguments(5, 96, jnp.float32)
    total, normed = xla_norm.add_rms_norm(x, update, weight, 1e-5)
    np.testing.assert_array_equal(total, x + update)
    y = np.asarray(x + update, np.float64)
    want = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight)
    np.testing.assert_allclose(normed, want, rtol=1e-5, atol=1e-6)


def test_plain_activation():
    h = normal(5, 2, 96, dtype=jnp.float32)
    gate, up = np.asarray(h[:, 0], np.float64), np.asarray(h[:, 1], np.float64)
    np.testing.assert_allclose(
        xla_activation.silu_and_mul(h), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("T", "D"), NORMS)
def test_norm_against_plain(T, D):
    got = jax.jit(mosaic_norm.add_rms_norm, static_argnums=3)(*norm_arguments(T, D), 1e-5)
    want = xla_norm.add_rms_norm(*norm_arguments(T, D), 1e-5)
    np.testing.assert_array_equal(f32(got[0]), f32(want[0]))
    np.testing.assert_allclose(f32(got[1]), f32(want[1]), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("T", "F"), ACTIVATIONS)
def test_activation_against_plain(T, F):
    h = normal(T, 2, F)
    got = jax.jit(mosaic_activation.silu_and_mul)(h)
    np.testing.assert_allclose(f32(got), f32(xla_activation.silu_and_mul(h)), rtol=1e-2, atol=1e-2)


def test_they_lower_for_cuda():
    for T, D in NORMS:
        run = jax.jit(lambda x, u, w: mosaic_norm.add_rms_norm(x, u, w, 1e-5))
        text = run.trace(*norm_arguments(T, D)).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in text.as_text()
    for T, F in ACTIVATIONS:
        traced = jax.jit(mosaic_activation.silu_and_mul).trace(normal(T, 2, F))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals():
    x, update, weight = norm_arguments(2, 256)
    with pytest.raises(ValueError, match="16-bit"):
        mosaic_norm.add_rms_norm(x.astype(jnp.float32), update, weight, 1e-5)
    with pytest.raises(ValueError, match="multiples of 128"):
        mosaic_norm.add_rms_norm(*norm_arguments(2, 200), 1e-5)
    with pytest.raises(ValueError, match="16-bit"):
        mosaic_activation.silu_and_mul(normal(2, 2, 256, dtype=jnp.float32))
    with pytest.raises(ValueError, match="multiples of 8"):
        mosaic_activation.silu_and_mul(normal(2, 2, 257))
