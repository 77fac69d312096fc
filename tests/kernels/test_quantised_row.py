"""GEMVs of few bits that compute their input row: its norm, or the merge of its partial results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import merged_row, normal, unmerged_row
from interpreted_mosaic import interpreting, load_interleaved, store_transposed
from jax.experimental import pallas as pl
from quantised_weights import error, weight_of, weight_spec

from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.gemm.few_bits import (
    norm_quantise,
    one_row,
    quantised_gemm,
    quantised_rows,
    upcast,
)
from rjax.pallas_kernels.gemm.few_bits.config import GemmConfig
from rjax.pallas_kernels.gemm.few_bits.quantised_row import QuantisedRow
from rjax.pallas_kernels.gemm.gemv_row import MergedRow, NormedRow, StoredRow
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.pallas_kernels.residual import base as norm
from rjax.pallas_kernels.weight import ScaledLayout

# (D, F, N, H, projections): of Llama-3-8B, Qwen2.5-3B, Qwen2.5-0.5B, odd sizes
MODELS = [
    (4096, 14336, 32, 128, 6144),
    (2048, 11008, 16, 128, 2560),
    (896, 4864, 14, 64, 1152),
    (1280, 3456, 16, 80, 1920),
]
KINDS = ("fp8", "int8", "int4 zeros", "int4 interleaved", "int4 interleaved zeros")
EPS = 1e-5


def spec(*shape, dtype=jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def multiplied(row, weight, config=None) -> tuple[jax.Array, ...]:
    """The products and the further results."""
    if len(weight.values) == 1:
        return quantised_gemm.split_k_products(row, weight, config)
    return quantised_gemm.gated_products(row, weight, config)


def wanted(row, weight) -> np.ndarray:
    """float64 [X], in plain arithmetic."""
    matrices = np.asarray(weight.dequantise(), np.float64)
    sums = matrices @ np.asarray(row, np.float64)
    return sums[0] if len(sums) == 1 else sums[0] / (1 + np.exp(-sums[0])) * sums[1]


def summed(products) -> np.ndarray:
    """The only row of split-K partials or of a gated product."""
    products = np.asarray(products, np.float64)
    return products.sum(0)[0] if products.ndim == 3 else products[0]


@pytest.mark.sample(5, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_kernels_lower(model, kind):
    D, F, N, H, E = model
    row, weight, update = spec(1, D), spec(D), Partial(spec(4, 1, D, dtype=jnp.float32))
    entries = spec(48, N, H), spec(48, N, dtype=jnp.float32)
    attention = UnmergedAttention(spec(1, N, H), *entries, spec(2, dtype=jnp.int32))

    def normed(*a):
        x, update, norm_weight, weight = a
        return one_row.norm_quantised_gemm(x, update, norm_weight, EPS, weight)

    def normed_gated(*a):
        x, update, norm_weight, weight = a
        return one_row.norm_quantised_gate_up_gemm(x, update, norm_weight, EPS, weight)

    calls = [
        (one_row.merge_quantised_gemm, (attention, weight_spec(kind, 1, D, N * H))),
        (quantised_gemm.quantised_gemm, (spec(1, F), weight_spec(kind, 1, D, F))),
        (normed, (row, update, weight, weight_spec(kind, 1, E, D))),
        (normed_gated, (row, row, weight, weight_spec(kind, 2, F, D))),
    ]
    for (function, arguments), width in zip(calls, (D, D, E, F), strict=True):
        traced = jax.jit(function).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))
        assert jax.tree.leaves(traced.out_info)[-1].shape[-2:] == (1, width)


class PlainRow(StoredRow):
    """A row that is stored as the interpreter can: it has no tiles and no swizzle."""

    def fill(self, refs, results, smem_row, scratch, is_first) -> None:
        [h] = refs
        smem_row.ref[0] = h[0, pl.ds(smem_row.start, smem_row.max_columns)]


# The last has more groups of warpgroups than the second split has stages.
@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("kind", "shape", "config"),
    [
        ("int4", (1, 128, 1024), None),
        ("int4 interleaved", (1, 128, 1024), None),
        ("int4 interleaved zeros", (2, 64, 512), None),
        ("int8", (2, 64, 640), None),
        ("int4 interleaved zeros", (1, 128, 1280), GemmConfig(1, 256, 2, 2)),
        ("int8", (1, 64, 640), GemmConfig(1, 128, 5, 3)),
        ("int4", (1, 128, 1280), GemmConfig(2, 256, 1, 2, stage_groups=2)),
        ("int8", (1, 64, 640), GemmConfig(1, 128, 2, 3, stage_groups=3)),
    ],
)
def test_arithmetic(kind, shape, config, monkeypatch):
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_interleaved", load_interleaved)
    weight, h = weight_of(kind, *shape), normal(1, shape[2])
    with interpreting(monkeypatch):
        [found] = multiplied(PlainRow(h), weight, config)
    assert error(summed(found), wanted(h[0], weight)) < (1e-5 if shape[0] == 1 else 4e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("largest", [1e-30, 0.4, 1.0, 127.0, 3e4])
def test_arithmetic_of_rows_of_any_size(largest, monkeypatch):
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_interleaved", load_interleaved)
    weight = weight_of("int4 interleaved", 1, 64, 512)
    h = normal(1, 512, dtype=jnp.float32)
    h = (h * largest / jnp.abs(h).max()).astype(jnp.bfloat16)
    with interpreting(monkeypatch):
        [found] = multiplied(PlainRow(h), weight)
    assert error(summed(found), wanted(h[0], weight)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("int4 interleaved", (2, 14336, 4096)),
        ("int8", (2, 14336, 4096)),
        ("int4 interleaved", (1, 4096, 14336)),
        ("int4 interleaved", (2, 28672, 8192)),  # no CTA holds such a row
        ("int4", (2, 14336, 4096)),
    ],
)
def test_stored_rows_lower(kind, shape):
    gemm = quantised_gemm.quantised_gate_up_gemm if shape[0] == 2 else quantised_gemm.quantised_gemm
    traced = jax.jit(gemm).trace(spec(1, shape[2]), weight_spec(kind, *shape))
    traced.lower(lowering_platforms=("cuda",))
    assert jax.tree.leaves(traced.out_info)[0].shape[-2:] == (1, shape[1])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"rows": 8}, "8 rows"),
        ({"depth": 8192}, "8192 columns"),
        ({"block": (128, 128), "values": "fp8"}, "128 x 128"),
        ({"pending_bias": True}, "bias"),
    ],
)
def test_what_the_kernels_do_not_take(change, found):
    assert one_row.row_refusal(problem()) is None
    assert found in (one_row.row_refusal(problem(**change)) or "")
    channels = {"values": "fp8", "block": (1, 4096)}
    assert one_row.row_refusal(problem(**channels)) is None
    wide: Any = {"operation": "merge_linear", "depth": 8192}
    assert one_row.row_refusal(problem(**wide, values="fp8", block=(1, 8192))) is None
    assert "8192 columns" in (one_row.row_refusal(problem(**wide)) or "")


def problem(values="int4", block=(1, 128), **change) -> LinearProblem:
    dtype = jnp.dtype(jnp.float8_e4m3fn if values == "fp8" else values)
    layout = ScaledLayout(values, dtype, block, block[1] == 4096, False, None)
    given: Any = {"operation": "norm_linear", "rows": 1, "depth": 4096, "dtype": "bfloat16"}
    return LinearProblem(layout=layout, **given | change)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_row_that_is_a_norm(model, kind):
    D, F, _, _, E = model
    x, norm_weight = normal(1, D), normal(D, seed=2)
    for W, columns, parts in ((1, E, 4), (2, F, 7), (1, E, 0)):
        summands = normal(max(parts, 1), 1, D, dtype=jnp.float32, seed=1)
        update = Partial(summands) if parts else summands[0].astype(jnp.bfloat16)
        weight = weight_of(kind, W, columns, D)
        total, row = norm.add_rms_norm(x, update, norm_weight, EPS)
        row = quantised_rows.quantise_rows_xla(row).dequantise() if kind == "fp8" else row
        run = one_row.norm_quantised_gemm if W == 1 else one_row.norm_quantised_gate_up_gemm
        run = jax.jit(run, static_argnums=3)
        first, again = (run(x, update, norm_weight, EPS, weight) for _ in range(2))
        np.testing.assert_array_equal(np.asarray(first[0]), np.asarray(total))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        found = first[1][0] if W == 2 else np.asarray(first[1].summands).sum(0)[0]
        # Norms round a few numbers to their neighbours.
        limit = 1e-3 if W == 1 else 5e-3
        assert error(np.asarray(found, np.float32), wanted(row[0], weight)) < limit


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("model", MODELS)
def test_a_quantised_row_has_the_bits_of_separate_kernels(model):
    D, F, _, _, E = model
    x, update, norm_weight = normal(1, D), normal(1, D, seed=1), normal(D, seed=2)
    total, rows = norm_quantise.add_rms_norm_quantise(x, update, norm_weight, EPS)
    hidden = normal(1, F, seed=4)
    stored = quantised_rows.quantise_rows(hidden)
    for source, quantised, shape in (
        (NormedRow(x, update, norm_weight, EPS), rows, (1, E, D)),
        (StoredRow(hidden), stored, (1, D, F)),
    ):
        weight = weight_of("fp8", *shape)
        config = quantised_gemm.gemm_configs(QuantisedRow(source), weight)[0]
        found = quantised_gemm.split_k_products(QuantisedRow(source), weight, config)
        [want] = quantised_gemm.split_k_products(quantised, weight, config)
        np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(want))
        for more in found[1:]:
            np.testing.assert_array_equal(np.asarray(more), np.asarray(total))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("entries", [0, 1, 7, 45])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["fp8", "int4 interleaved"])
def test_a_row_that_is_merged(model, entries, kind):
    D, _, N, H, _ = model
    given, weight = unmerged_row(N, H, entries), weight_of(kind, 1, D, N * H)
    run = jax.jit(one_row.merge_quantised_gemm)
    first, again = run(given, weight), run(given, weight)
    np.testing.assert_array_equal(first.summands, again.summands)
    found = np.asarray(first.summands).sum(0)[0]
    if entries == 0:
        assert not found.any()
    else:
        limit = 0.04 if kind == "fp8" else 3e-3  # the row is rounded
        assert error(found, wanted(merged_row(given), weight)) < limit


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", ["int8", "int4 interleaved", "int4 interleaved zeros"])
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
        (hidden, hidden[0], (1, D, F)),
        (MergedRow(attention), merged_row(attention), (1, D, N * H)),
    ):
        weight = weight_of(kind, *shape)
        for config in quantised_gemm.gemm_configs(source, weight)[:4]:
            first, again = (multiplied(source, weight, config) for _ in range(2))
            for a, b in zip(first, again, strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            for more in first[1:]:
                np.testing.assert_array_equal(np.asarray(more), np.asarray(total))
            # Norms and merges round a few numbers to their neighbours.
            exact = isinstance(source, jax.Array)
            limit = 5e-3 if shape[0] == 2 else 1e-5 if exact else 3e-3
            assert error(summed(first[0]), wanted(row, weight)) < limit, config


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(wrong):
    weight = weight_of("int4 interleaved", 1, 256, 512)
    row = normal(1, 512).at[0, 300].set(wrong)
    partial = quantised_gemm.quantised_gemm(row, weight)
    assert not np.isfinite(summed(partial.summands)).any()
