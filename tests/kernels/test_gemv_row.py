"""GEMVs that compute their input row: its norm, or the merge of its partial results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_rows import merged_row, normal, unmerged_row

from rjax.pallas_kernels.gemm import gate_up_gemm as gated
from rjax.pallas_kernels.gemm import split_k_gemm as split
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.pallas_kernels.residual import base as norm

# (D, F, N, H, projections): of Llama-3-8B, Qwen2.5-3B, Qwen2.5-0.5B, the bundled model, odd sizes
MODELS = [
    (4096, 14336, 32, 128, 6144),
    (2048, 11008, 16, 128, 2560),
    (896, 4864, 14, 64, 1152),
    (384, 1024, 6, 64, 640),
    (1280, 3456, 16, 80, 1920),
]
EPS = 1e-5


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def normed_arguments(D, E, parts=4):
    summands = normal(max(parts, 1), 1, D, dtype=jnp.float32, seed=1)
    update = Partial(summands) if parts else summands[0].astype(jnp.bfloat16)
    return normal(1, D), update, normal(D, seed=2), normal(D, *E, seed=3, scale=D**-0.5)


def product(row, w):
    return np.asarray(row, np.float64) @ np.asarray(w, np.float64)


def error(found, want):
    return np.linalg.norm(np.asarray(found, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("model", MODELS)
def test_kernels_lower(model):
    D, F, N, H, E = model
    row, weight, update = spec(1, D), spec(D), Partial(spec(4, 1, D, dtype=jnp.float32))
    entries = spec(48, N, H), spec(48, N, dtype=jnp.float32)
    attention = UnmergedAttention(spec(1, N, H), *entries, spec(2, dtype=jnp.int32))

    def normed(*a):
        return split.norm_split_k_gemm(*a[:3], EPS, a[3])

    def normed_gated(*a):
        return gated.norm_gate_up_gemm(*a[:3], EPS, a[3])

    calls = [
        (split.split_k_gemm, (spec(1, F), spec(F, D))),
        (split.merge_split_k_gemm, (attention, spec(N * H, D))),
        (normed, (row, update, weight, spec(D, E))),
        (normed_gated, (row, update, weight, spec(D, 2, F))),
        (normed_gated, (row, row, weight, spec(D, 2, F))),
    ]
    shapes = [(1, D), (1, D), (1, E), (1, F), (1, F)]
    for (function, arguments), shape in zip(calls, shapes, strict=True):
        traced = jax.jit(function).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))
        assert jax.tree.leaves(traced.out_info)[-1].shape[-2:] == shape


@pytest.mark.parametrize(
    ("depth", "columns", "found"),
    [(192, 128, "192 x 128; with 1 rows .* 128 x 64"), (65536, 4096, "a CTA takes at most 5120")],
)
def test_what_the_kernels_do_not_take(depth, columns, found):
    h, w = spec(1, depth), spec(depth, columns)
    with pytest.raises(ValueError, match=found):
        jax.eval_shape(split.split_k_gemm, h, w)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("model", MODELS)
def test_a_stored_row(model):
    D, F, *_ = model
    h, w = normal(1, F), normal(F, D, seed=1)
    run = jax.jit(split.split_k_gemm)
    first, again = run(h, w), run(h, w)
    np.testing.assert_array_equal(first.summands, again.summands)
    assert error(np.asarray(first.summands).sum(0)[0], product(h[0], w)) < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("parts", [0, 1, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_row_that_is_a_norm(model, parts):
    D, F, _, _, E = model
    for columns in ((E,), (2, F)):
        x, update, weight, w = normed_arguments(D, columns, parts)
        total, row = norm.add_rms_norm(x, update, weight, EPS)
        run = jax.jit(
            split.norm_split_k_gemm if len(columns) == 1 else gated.norm_gate_up_gemm,
            static_argnums=3,
        )
        first, again = run(x, update, weight, EPS, w), run(x, update, weight, EPS, w)
        np.testing.assert_array_equal(np.asarray(first[0]), np.asarray(total))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        if len(columns) == 1:
            # Norms round a few numbers to their neighbours.
            assert error(np.asarray(first[1].summands).sum(0)[0], product(row[0], w)) < 1e-3
        else:
            gate, up = product(row[0], w[:, 0]), product(row[0], w[:, 1])
            assert error(first[1][0].astype(jnp.float32), gate / (1 + np.exp(-gate)) * up) < 4e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("entries", [0, 1, 2, 7, 18, 19, 45])
@pytest.mark.parametrize("model", MODELS)
def test_a_row_that_is_merged(model, entries):
    D, _, N, H, _ = model
    given, w = unmerged_row(N, H, entries), normal(N * H, D, seed=7, scale=(N * H) ** -0.5)
    run = jax.jit(split.merge_split_k_gemm)
    first, again = run(given, w), run(given, w)
    np.testing.assert_array_equal(first.summands, again.summands)
    want = product(merged_row(given), w)
    found = np.asarray(first.summands).sum(0)[0]
    if entries == 0:
        assert not found.any()
    else:
        assert error(found, want) < 3e-3  # the merged row is rounded
