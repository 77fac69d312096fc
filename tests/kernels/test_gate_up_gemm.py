"""The gate-up GEMM of few rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gemm.gate_up_gemm import gate_up_gemm

# (T, D, F): of Llama-3-8B, Qwen2.5-3B, Qwen2.5-0.5B
SHAPES = [
    (128, 4096, 14336),
    (64, 4096, 14336),
    (8, 4096, 14336),
    (128, 2048, 11008),
    (32, 2048, 11008),
    (16, 896, 4864),
]


def arguments(T, D, F, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((T, D), np.float32), rng.standard_normal((D, 2, F), np.float32)
    return jnp.asarray(h, dtype), jnp.asarray(w * D**-0.5, dtype)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_lowers(shape, dtype):
    T, D, F = shape
    h, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((T, D), (D, 2, F)))
    traced = jax.jit(gate_up_gemm).trace(h, w)
    traced.lower(lowering_platforms=("cuda",))
    assert (traced.out_info.shape, traced.out_info.dtype) == ((T, F), dtype)


@pytest.mark.parametrize(
    ("T", "D", "F", "dtype", "found"),
    [
        (7, 128, 128, jnp.bfloat16, "7 rows"),
        (8, 96, 128, jnp.bfloat16, "96 x 128"),
        (8, 128, 96, jnp.bfloat16, "128 x 96"),
        (8, 128, 128, jnp.float32, "float32"),
    ],
)
def test_what_the_kernel_does_not_take(T, D, F, dtype, found):
    with pytest.raises(ValueError, match=found):
        gate_up_gemm(*arguments(T, D, F, dtype))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", [*SHAPES, (8, 64, 64)])
def test_against_float32(shape):
    h, w = arguments(*shape)
    run = jax.jit(gate_up_gemm)
    first, again = np.asarray(run(h, w), np.float32), np.asarray(run(h, w), np.float32)
    np.testing.assert_array_equal(first, again)
    with jax.default_matmul_precision("highest"):
        sums = jnp.einsum("TD,DAF->ATF", h.astype(jnp.float32), w.astype(jnp.float32))
    want = np.asarray(jax.nn.silu(sums[0]) * sums[1])
    assert np.linalg.norm(first - want) / np.linalg.norm(want) < 2.5e-3  # of the rounded result
