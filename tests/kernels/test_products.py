"""Products of few rows: the plain form against float32, the mosaic form's lowering and numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.model_shapes import SHAPES
from pallas_kernels.products import mosaic, xla
from pallas_kernels.products.tiling import Tiling, choose_tiling, most_slots, refusal

EPS = 1e-5
MODELS = ["qwen2.5-0.5b", "qwen2.5-3b", "llama-3-8b"]
SMALL = [(16, 896, 1152, 608), (8, 128, 48, 200), (16, 512, 272, 512), (8, 4096, 96, 128)]


def normal(*shape, seed=0, dtype=jnp.bfloat16, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def shapes(model):
    """D, N * H, E and F."""
    c = SHAPES[model]
    D, N, K = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    return D, D, D + 2 * K * (D // N), c["intermediate_size"]


def f64(x):
    return np.asarray(x, np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


def close(got, want, tolerance=4e-3):
    """Within bfloat16's rounding, as a share of the whole."""
    got, want = f64(got), f64(want)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def check_product(backend, T, D, E):
    h, w, squares = normal(T, D), normal(D, E, seed=1, scale=D**-0.5), 9 + abs(normal(T, 24))
    squares = squares.astype(jnp.float32)
    scale = 1 / np.sqrt(f64(squares).sum(1, keepdims=True) / D + EPS)
    close(jax.jit(backend.product)(h, w), f64(h) @ f64(w))
    run = jax.jit(functools.partial(backend.product, eps=EPS))
    close(run(h, w, squares), f64(h) @ f64(w) * scale)


def check_gated(backend, T, D, F):
    h, w, squares = normal(T, D), normal(D, 2, F, seed=1, scale=D**-0.5), 9 + abs(normal(T, 8))
    squares = squares.astype(jnp.float32)
    scale = 1 / np.sqrt(f64(squares).sum(1, keepdims=True) / D + EPS)
    gate, up = (f64(h) @ f64(w[:, i]) * scale for i in range(2))
    run = jax.jit(functools.partial(backend.gated_product, eps=EPS))
    close(run(h, w, squares), silu(gate) * up)


def check_add(backend, T, F, D):
    x, h, w = normal(T, D), normal(T, F, seed=1), normal(F, D, seed=2, scale=F**-0.5)
    weight = normal(D, seed=3)
    total, scaled, squares = jax.jit(backend.add_product)(x, h, w, weight)
    close(total, f64(x) + f64(h) @ f64(w))
    # Of the sum as it has been rounded.
    np.testing.assert_array_equal(f64(scaled), f64((total * weight).astype(jnp.bfloat16)))
    np.testing.assert_allclose(f64(squares).sum(1), (f64(total) ** 2).sum(1), rtol=1e-5)


def check_layer(backend, T, D, N, E, F):
    """Norms without kernels of their own come to what norms are."""
    x, attended, w_out = normal(T, D), normal(T, N, seed=1), normal(N, D, seed=2, scale=N**-0.5)
    weight, next_weight = normal(D, seed=3), normal(D, seed=4)
    w_up, w_down = normal(D, 2, F, seed=5, scale=D**-0.5), normal(F, D, seed=6, scale=F**-0.5)
    w_qkv = normal(D, E, seed=7, scale=D**-0.5)

    @jax.jit
    def layer(x, attended, w_out, weight, next_weight, w_up, w_down, w_qkv):
        x, scaled, squares = backend.add_product(x, attended, w_out, weight)
        hidden = backend.gated_product(scaled, w_up, squares, EPS)
        x, scaled, squares = backend.add_product(x, hidden, w_down, next_weight)
        return x, backend.product(scaled, w_qkv, squares, EPS)

    got = layer(x, attended, w_out, weight, next_weight, w_up, w_down, w_qkv)

    def rms_norm(y, weight):
        return y / np.sqrt((y**2).mean(1, keepdims=True) + EPS) * f64(weight)

    y = f64(x) + f64(attended) @ f64(w_out)
    normed = rms_norm(y, weight)
    hidden = silu(normed @ f64(w_up[:, 0])) * (normed @ f64(w_up[:, 1]))
    y = y + hidden @ f64(w_down)
    close(got[0], y, 1e-2)
    close(got[1], rms_norm(y, next_weight) @ f64(w_qkv), 1e-2)
    return got


@pytest.mark.parametrize(("T", "D", "E", "F"), [(3, 96, 40, 56), *SMALL[:2]])
def test_plain_forms(T, D, E, F):
    check_product(xla, T, D, E)
    check_gated(xla, T, D, F)
    check_add(xla, T, F, D)
    check_layer(xla, T, D, 64, E, F)


def lower(run, *arguments):
    traced = jax.jit(run).trace(*(jax.ShapeDtypeStruct(*a) for a in arguments))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


def bf16(*shape):
    return shape, jnp.bfloat16


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("T", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_they_lower_for_cuda(model, T, ready):
    D, N, E, F = shapes(model)
    assert mosaic.supported(T, N, D) and mosaic.supported(T, F, D)
    squares = ((T, 56), jnp.float32)
    add = functools.partial(mosaic.add_product, weights_ready=ready)
    for depth in (N, F):
        text = lower(add, bf16(T, D), bf16(T, depth), bf16(depth, D), bf16(D))
        assert "add_product" in text
    run = functools.partial(mosaic.product, eps=EPS, weights_ready=ready)
    lower(run, bf16(T, D), bf16(D, E))
    lower(run, bf16(T, D), bf16(D, E), squares)
    run = functools.partial(mosaic.gated_product, eps=EPS, weights_ready=ready)
    assert "gated_product" in lower(run, bf16(T, D), bf16(D, 2, F), squares)


@pytest.mark.parametrize("multiprocessors", [132, 114, 16])
def test_tilings_fit(multiprocessors):
    """Rings fit shared memory, chunks the depth; few programs are left to a second turn."""
    for model in MODELS:
        D, N, E, F = shapes(model)
        for T in (8, 16):
            for depth, columns, parts, whole in (
                (D, E, 1, False),
                (N, D, 1, True),
                (D, F, 2, False),
                (F, D, 1, True),
            ):
                found = choose_tiling(
                    T, depth, columns, parts=parts, whole=whole, multiprocessors=multiprocessors
                )
                n, chunk, ring = found.columns, found.chunk, found.ring
                assert depth % chunk == 0 and n % 16 == 0
                assert not whole or columns % n == 0
                used = ring * parts * n * chunk + ((ring - 1) * T + 64) * chunk
                assert 2 * used <= 232448 - 1024
                resident = 1 if columns <= n * multiprocessors else 2
                in_flight = resident * ring * parts * n * chunk * 2
                assert ring * chunk == depth or in_flight >= 48 * 1024, found
                assert ring <= most_slots(T, depth, n, chunk, parts=parts, resident=1)


def test_refusals():
    arguments = normal(16, 128), normal(128, 64)
    with pytest.raises(ValueError, match="w float16: the kernels take bfloat16"):
        mosaic.product(arguments[0], arguments[1].astype(jnp.float16))
    with pytest.raises(ValueError, match=r"12 rows; .* 8 or 16"):
        mosaic.product(normal(12, 128), arguments[1])
    with pytest.raises(ValueError, match="depth of 96"):
        mosaic.product(normal(16, 96), normal(96, 64))
    with pytest.raises(ValueError, match="20 columns"):
        mosaic.gated_product(normal(16, 128), normal(128, 2, 20))
    with pytest.raises(ValueError, match=r"24 columns; .* multiples of 16"):
        mosaic.add_product(normal(8, 24), normal(8, 64), normal(64, 24), normal(24))
    with pytest.raises(ValueError, match="does not divide"):
        mosaic.product(*arguments, tiling=Tiling(16, 192, 2))
    with pytest.raises(ValueError, match="ring of 3"):
        mosaic.product(*arguments, tiling=Tiling(16, 64, 3))
    assert refusal(8, 64, 24, whole=False) is None
    assert not mosaic.supported(32, 128, 128) and not mosaic.supported(16, 128, 24)


def needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


def poison_memory():
    """What kernels leave unwritten, in GMEM and in shared memory, is NaN."""
    full = [jnp.full(size, jnp.nan, jnp.bfloat16) for size in [1 << n for n in range(8, 26)]]
    w = jnp.full((4096, 2048), jnp.nan, jnp.bfloat16)
    jax.block_until_ready([full, mosaic.product(jnp.full((16, 4096), jnp.nan, w.dtype), w)])


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D", "E", "F"), SMALL)
def test_mosaic_numbers(T, D, E, F):
    needs_gpu()
    for check in (
        lambda: check_product(mosaic, T, D, E),
        lambda: check_gated(mosaic, T, D, F),
        lambda: check_add(mosaic, T, 256, D),
    ):
        poison_memory()
        check()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_mosaic_layer(model, T):
    needs_gpu()
    poison_memory()
    first = check_layer(mosaic, T, *shapes(model))
    poison_memory()
    again = check_layer(mosaic, T, *shapes(model))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(f64(a), f64(b))
