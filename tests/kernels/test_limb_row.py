"""GEMVs of integer weights and a row that is split into limbs of seven bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import merged_row, normal, unmerged_row
from interpreted_mosaic import (
    interpreting,
    load_sixteenfold,
    lower_halves_first,
    store_transposed,
)
from jax.experimental import pallas as pl
from quantised_weights import error, weight_of, weight_spec

from rjax.pallas_kernels.add_rms_norm import xla as norm
from rjax.pallas_kernels.gemv_row import MergedRow, NormedRow, StoredRow
from rjax.pallas_kernels.quantised_gemm import limb_row, mosaic, upcast
from rjax.pallas_kernels.quantised_gemm.config import GemmConfig
from rjax.pallas_kernels.quantised_gemm.interleaving import interleave
from rjax.pallas_kernels.quantised_gemm.limb_row import LIMBS, LimbRow
from rjax.pallas_kernels.unmerged_attention import UnmergedAttention

KINDS = ("int8", "int4 interleaved", "int4 interleaved zeros")
# (D, F, N, H, projections): of Llama-3-8B, Qwen2.5-3B, Qwen2.5-0.5B, odd sizes
MODELS = [
    (4096, 14336, 32, 128, 6144),
    (2048, 11008, 16, 128, 2560),
    (896, 4864, 14, 64, 1152),
    (1280, 3456, 16, 80, 1920),
]
EPS = 1e-5


def spec(*shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def limbs_of(source, weight) -> LimbRow:
    assert limb_row.refusal(weight) is None
    return LimbRow(source, weight.bits, weight.zero_points is not None)


def multiplied(row, weight, config=None) -> tuple[jax.Array, ...]:
    """The products and the further results."""
    multiply = mosaic.split_k_products if len(weight.values) == 1 else mosaic.gated_products
    return multiply(row, weight, config)


def wanted(row, weight) -> np.ndarray:
    """float64 [X], in plain arithmetic."""
    sums = np.asarray(weight.dequantise(), np.float64) @ np.asarray(row, np.float64)
    return sums[0] if len(sums) == 1 else sums[0] / (1 + np.exp(-sums[0])) * sums[1]


def summed(products) -> np.ndarray:
    products = np.asarray(products, np.float64)
    return products.sum(0)[0] if products.ndim == 3 else products[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [MODELS[0], MODELS[3]])
def test_kernels_lower(model, kind):
    D, F, N, H, E = model
    entries = spec(48, N, H), spec(48, N, dtype=jnp.float32)
    attention = UnmergedAttention(spec(1, N, H), *entries, spec(2, dtype=jnp.int32))

    def merged(attention, weight):
        return multiplied(limbs_of(MergedRow(attention), weight), weight)

    def stored(h, weight):
        return multiplied(limbs_of(StoredRow(h), weight), weight)

    def normed(x, update, norm_weight, weight):
        row = NormedRow(x, update, norm_weight, EPS)
        return multiplied(limbs_of(row, weight), weight)

    rows = spec(1, D), spec(1, D), spec(D)
    for function, given, shape in (
        (merged, (attention,), (1, D, N * H)),
        (stored, (spec(1, F),), (1, D, F)),
        (normed, rows, (1, E, D)),
        (normed, rows, (2, F, D)),
    ):
        traced = jax.jit(function).trace(*given, weight_spec(kind, *shape))
        traced.lower(lowering_platforms=("cuda",))
        assert jax.tree.leaves(traced.out_info)[0].shape[-2:] == (1, shape[1])


def split(row: np.ndarray) -> tuple[np.ndarray, float]:
    """(limbs [LIMBS, E], scale), as the kernel computes them for one slice."""
    exponent = 5 - int(np.floor(np.log2(max(np.abs(row).max(), 2.0**-100))))
    rest, limbs = row.astype(np.float64) * 2.0**exponent, []
    for _ in range(LIMBS):
        limbs.append(np.rint(rest))
        rest = (rest - limbs[-1]) * 128
    return np.stack(limbs), 2.0**-exponent


def as_multiplied(row):
    """The columns of a row in the order in which ``load_sixteenfold`` has the weights."""
    blocks = row.reshape(-1, 2, 2, 4, 2)  # upper half of a byte: pairs 1 and 3, not 0 and 2
    return blocks.transpose(0, 2, 3, 4, 1).reshape(row.shape)


class PlainLimbRow(LimbRow):
    """Limbs that are computed before, and stored as the interpreter can: without tiles."""

    @property
    def operands(self):
        [h] = self.source.operands
        limbs, scale = split(np.asarray(h[0], np.float32))
        rows = np.full((8, h.shape[1]), 77, np.int8)
        sums, factors = np.zeros((h.shape[1] // 128, 8), np.float32), np.zeros((1, 8), np.float32)
        for i, limb in enumerate(limbs):
            rows[i] = as_multiplied(limb) if self.bits == 4 else limb
            factors[0, i] = scale / 128**i / limb_row.unit_of(self.bits)
            sums[:, i] = limb.reshape(-1, 128).sum(1)
        return tuple(map(jnp.asarray, (rows, factors, sums)))

    def fill(self, refs, results, smem_row, scratch, is_first) -> None:
        rows, factors, sums = refs
        smem_row.ref[...] = rows[:, pl.ds(smem_row.start, smem_row.max_columns)]
        smem_row.scale[...] = factors[...]
        if self.has_sums:
            groups = smem_row.sums.shape[0]
            smem_row.sums[...] = sums[pl.ds(smem_row.start // 128, groups)]


@pytest.mark.parametrize(
    ("kind", "shape", "config"),
    [
        ("int4 interleaved", (1, 128, 1024), None),
        ("int4 interleaved zeros", (2, 64, 512), None),
        ("int8", (2, 64, 640), None),
        ("int4 interleaved zeros", (1, 128, 1280), GemmConfig(1, 256, 2, 2)),
        ("int8", (1, 64, 640), GemmConfig(1, 128, 5, 3)),
    ],
)
def test_arithmetic(kind, shape, config, monkeypatch):
    monkeypatch.setattr(mosaic, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_sixteenfold", load_sixteenfold)
    weight, h = weight_of(kind, *shape), normal(1, shape[2])
    row = PlainLimbRow(StoredRow(h), weight.bits, weight.zero_points is not None)
    with interpreting(monkeypatch):
        [found] = multiplied(row, weight, config)
    assert error(summed(found), wanted(h[0], weight)) < (1e-5 if shape[0] == 1 else 4e-3)


def test_limbs_are_in_the_order_of_the_weights():
    """The bytes that a thread stores, beside the halves of bytes that wgmma takes as int8."""
    digits = [np.arange(32) // 8, np.arange(32) % 8 - 4]  # an int4 has no room for all
    moved = [lower_halves_first(interleave(jnp.asarray(digit, jnp.int4))) for digit in digits]
    weights = 8 * np.asarray(moved[0], int) + np.asarray(moved[1], int) + 4
    np.testing.assert_array_equal(as_multiplied(np.arange(32)), weights)
    stored = []
    for which in range(2):
        first, second = (np.arange(8) + 8 * which + offset for offset in (0, 16))
        for half in (slice(0, 4), slice(4, 8)):
            both = np.concatenate([first[half], second[half]])
            for order in limb_row._ORDERS:
                stored += [both[order >> 4 * i & 7] for i in range(4)]
    np.testing.assert_array_equal(stored, weights)


@pytest.mark.parametrize(
    ("kind", "shape", "taken"),
    [
        ("int4 interleaved", (2, 14336, 4096), True),
        ("int8", (2, 14336, 4096), True),
        ("int4 interleaved", (1, 4096, 14336), False),
        ("int4 interleaved", (2, 28672, 8192), False),  # no CTA holds such a row
        ("int4", (2, 14336, 4096), False),
        ("fp8", (2, 14336, 4096), False),
    ],
)
def test_which_gemvs_take_limbs(kind, shape, taken):
    weight = weight_spec(kind, *shape)
    limbs = mosaic.limbs_of(StoredRow(jnp.ones((1, shape[2]), jnp.bfloat16)), weight)
    assert (limbs is not None) == taken
    if kind != "fp8":
        gemm = mosaic.quantised_gate_up_gemm if shape[0] == 2 else mosaic.quantised_gemm
        jax.jit(gemm).trace(spec(1, shape[2]), weight).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("largest", [1e-30, 0.4, 1.0, 127.0, 3e4])
def test_limbs_keep_twenty_bits(largest):
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    row = np.asarray(jnp.asarray(values * largest / np.abs(values).max(), jnp.bfloat16), np.float32)
    limbs, scale = split(row)
    assert np.abs(limbs).max() <= 64
    found = (limbs * 128.0 ** -np.arange(LIMBS)[:, None]).sum(0) * scale
    assert np.abs(found - row).max() <= 2.0**-20 * largest
    near = np.abs(row) > 2.0**-11 * np.abs(row).max()
    np.testing.assert_array_equal(found[near], row[near])


@pytest.mark.parametrize(
    ("kind", "found"),
    [("fp8", "fp8"), ("int4", "natural order"), ("int4 64", "natural"), ("int8", None)],
)
def test_what_is_refused(kind, found):
    why = limb_row.refusal(weight_spec(kind, 1, 128, 256))
    assert why is None if found is None else found in why


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_every_source(model, kind):
    D, F, N, H, E = model
    x, update, norm_weight = normal(1, D), normal(1, D, seed=1), normal(D, seed=2)
    total, normed = norm.add_rms_norm(x, update, norm_weight, EPS)
    hidden = normal(1, F, seed=4) * jnp.where(jnp.arange(F) % 97 == 0, 300, 1).astype(jnp.bfloat16)
    attention = unmerged_row(N, H, 7)
    for source, row, shape in (
        (NormedRow(x, update, norm_weight, EPS), normed[0], (1, E, D)),
        (NormedRow(x, update, norm_weight, EPS), normed[0], (2, F, D)),
        (StoredRow(hidden), hidden[0], (1, D, F)),
        (MergedRow(attention), merged_row(attention), (1, D, N * H)),
    ):
        weight = weight_of(kind, *shape)
        limbs = limbs_of(source, weight)
        for config in mosaic.gemm_configs(limbs, weight)[:4]:
            first, again = (multiplied(limbs, weight, config) for _ in range(2))
            for a, b in zip(first, again, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            for more in first[1:]:
                np.testing.assert_array_equal(np.asarray(more), np.asarray(total))
            # Norms and merges round a few numbers to their neighbours.
            exact = isinstance(source, StoredRow)
            limit = 5e-3 if shape[0] == 2 else 1e-5 if exact else 3e-3
            assert error(summed(first[0]), wanted(row, weight)) < limit, config


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(wrong):
    weight = weight_of("int4 interleaved", 1, 256, 512)
    row = normal(1, 512).at[0, 300].set(wrong)
    [products] = multiplied(limbs_of(StoredRow(row), weight), weight)
    assert not np.isfinite(summed(products)).any()
