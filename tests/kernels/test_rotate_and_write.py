"""The fused rotary and KV write against the plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import mosaic, xla

# (T, N, K, H, R, S)
SHAPES = [(5, 32, 8, 128, 64, 64), (3, 14, 2, 64, 32, 16), (4, 8, 1, 80, 16, 32)]


def make(shape, dtype=jnp.bfloat16):
    T, N, K, H, R, S = shape
    rng = np.random.default_rng(3)

    def normal(*size, kind=dtype):
        return jnp.asarray(rng.standard_normal(size, np.float32), kind)

    slots = rng.permutation(6 * S)[:T].astype(np.int32)
    slots[-1] = -1
    return (
        normal(T, N, H),
        normal(T, K, H),
        normal(T, K, H),
        normal(T, R, kind=jnp.float32),
        normal(T, R, kind=jnp.float32),
        normal(6, K, S, H),
        normal(6, K, S, H),
        jnp.asarray(slots),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_against_plain(shape):
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    q, k, v, cos, sin, k_pages, v_pages, slots = args = make(shape)
    want_q = xla.rotate(q, cos, sin)
    want_k, want_v = xla.write_kv(xla.rotate(k, cos, sin), v, k_pages, v_pages, slots)
    got_q, got_k, got_v = jax.jit(mosaic.rotate_and_write)(*args)
    for got, want in ((got_q, want_q), (got_k, want_k), (got_v, want_v)):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=1e-2, atol=1e-2
        )
    untouched = np.ones(6 * shape[5], bool)
    untouched[np.asarray(slots)[:-1]] = False
    untouched = untouched.reshape(6, shape[5])
    for got, before in ((got_k, k_pages), (got_v, v_pages)):
        got, before = (np.asarray(x, np.float32).swapaxes(1, 2) for x in (got, before))
        np.testing.assert_array_equal(got[untouched], before[untouched])


@pytest.mark.parametrize("shape", SHAPES)
def test_lowers_for_cuda(shape):
    traced = jax.jit(mosaic.rotate_and_write).trace(*make(shape))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_refusals():
    args = list(make(SHAPES[0]))
    args[1] = args[1].astype(jnp.float32)
    with pytest.raises(ValueError, match="16-bit"):
        mosaic.rotate_and_write(*args)
    args = list(make(SHAPES[0]))
    args[3] = args[4] = jnp.ones((5, 65), jnp.float32)
    with pytest.raises(ValueError, match="frequencies"):
        mosaic.rotate_and_write(*args)
