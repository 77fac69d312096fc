"""The gated product: the plain form against float64, the mosaic form's lowering and numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.model_shapes import SHAPES
from pallas_kernels.gated_product import mosaic, xla
from pallas_kernels.gated_product.tiling import (
    ROW_COUNTS,
    Tiling,
    choose_tiling,
    misfit,
    most_slots,
)

MODELS = ["qwen2.5-3b", "llama-3-8b"]
# A ring longer than the chunks' half, runs of 32, 64 and 128 bytes, last tiles that end early.
SMALL = [
    (896, 576, Tiling(128, 64, 5)),
    (512, 192, Tiling(112, 128, 2)),
    (256, 320, Tiling(96, 64, 4)),
    (128, 128, Tiling(48, 64, 2)),
]


def normal(*shape, seed=0, dtype=jnp.bfloat16, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def shapes(model):
    return SHAPES[model]["hidden_size"], SHAPES[model]["intermediate_size"]


def check(run, T, D, F, tolerance=3e-3):
    """Within one rounding to bfloat16, as a share of the whole; the result."""
    h, w = normal(T, D), normal(D, 2, F, seed=1, scale=D**-0.5)
    gate, up = (np.asarray(h, np.float64) @ np.asarray(w[:, i], np.float64) for i in range(2))
    want = gate / (1 + np.exp(-gate)) * up
    got = np.asarray(jax.jit(run)(h, w), np.float64)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    return got


@pytest.mark.parametrize(("T", "D", "F"), [(3, 96, 56), (16, 256, 320)])
def test_plain_form(T, D, F):
    check(xla.gated_product, T, D, F, tolerance=1e-2)  # rounds the products too


def lower(T, D, F, tiling=None):
    run = jax.jit(functools.partial(mosaic.gated_product, tiling=tiling))
    arguments = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, D), (D, 2, F)))
    text = run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "gated_product" in text


@pytest.mark.parametrize("T", ROW_COUNTS)
def test_it_lowers_for_cuda(T):
    for model in MODELS:
        lower(T, *shapes(model))
    for small in SMALL:
        lower(T, *small)


@pytest.mark.parametrize("T", ROW_COUNTS)
def test_tilings_fit(T):
    """Rings fit shared memory with enough under way; programs run at once on most of the GPU."""
    for model in MODELS:
        D, F = shapes(model)
        found = choose_tiling(T, D, F, 132)
        assert found is not None and misfit(found, T, D) is None
        n, chunk, ring = found.columns, found.chunk, found.ring
        assert 106 <= -(-F // n) <= 132
        assert 2 * (ring * 2 * n * chunk + ((ring - 1) * T + 64) * chunk) <= 232448 - 1024
        assert ring * 2 * n * chunk * 2 >= 128 * 1024
        assert ring == most_slots(T, D, n, chunk)
    assert choose_tiling(T, 4096, 14336, 132) == Tiling(128, 64, 5 if T == 64 else 6)


def test_where_it_is_expected_to_win():
    for model in MODELS:
        assert all(mosaic.supported(T, *shapes(model)) for T in ROW_COUNTS)
        assert not mosaic.supported(4, *shapes(model))
    assert not mosaic.supported(8, *shapes("qwen2.5-0.5b"))  # 76 programs of 64 columns
    assert not mosaic.supported(8, 4096, 28672)  # 224 of 128
    assert not mosaic.supported(8, 4096, 14336 + 8)


def test_refusals():
    h, w = normal(16, 128), normal(128, 2, 64)
    small = functools.partial(mosaic.gated_product, tiling=Tiling(16, 64, 2))
    with pytest.raises(ValueError, match="w is float16; the kernel takes bfloat16"):
        small(h, w.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"12 rows; .* 8, 16, 32, 64"):
        small(normal(12, 128), w)
    with pytest.raises(ValueError, match=r"\[96, 2, 64\]; .* multiples of 64"):
        small(normal(16, 96), normal(96, 2, 64))
    with pytest.raises(ValueError, match="64 columns do not fill the 132"):
        mosaic.gated_product(h, w)
    for tiling, why in (
        (Tiling(24, 64, 2), "24 columns a program"),
        (Tiling(16, 96, 2), "chunk of 96"),
        (Tiling(16, 64, 3), "ring of 3"),
    ):
        with pytest.raises(ValueError, match=why):
            mosaic.gated_product(h, w, tiling=tiling)


def needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")


def poison_memory():
    """What kernels leave unwritten, in GMEM and in shared memory, is NaN."""
    full = [jnp.full(size, jnp.nan, jnp.bfloat16) for size in [1 << n for n in range(8, 26)]]
    w = jnp.full((4096, 2, 14336), jnp.nan, jnp.bfloat16)
    given = jnp.full((64, 4096), jnp.nan, w.dtype), w
    tiling = Tiling(128, 64, 5)
    jax.block_until_ready([full, mosaic.gated_product(*given, tiling=tiling)])


@pytest.mark.gpu
@pytest.mark.parametrize("T", ROW_COUNTS)
@pytest.mark.parametrize(("D", "F", "tiling"), SMALL)
def test_mosaic_numbers(T, D, F, tiling):
    needs_gpu()
    poison_memory()
    check(functools.partial(mosaic.gated_product, tiling=tiling), T, D, F)


@pytest.mark.gpu
@pytest.mark.parametrize("T", ROW_COUNTS)
@pytest.mark.parametrize("model", MODELS)
def test_mosaic_at_full_size(model, T):
    needs_gpu()
    D, F = shapes(model)
    tiling = choose_tiling(T, D, F, 132)
    run = functools.partial(mosaic.gated_product, tiling=tiling)
    poison_memory()
    first = check(run, T, D, F)
    poison_memory()
    np.testing.assert_array_equal(first, check(run, T, D, F))
