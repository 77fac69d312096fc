"""The grouped GEMM: arithmetic in the interpreter, lowering for CUDA, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting
from jax.experimental import pallas as pl

from rjax.pallas_kernels.experts import base, grouped_gemm, work_list_mosaic
from rjax.pallas_kernels.experts.config import GroupedConfig
from rjax.pallas_kernels.experts.work_list import make_work_list
from rjax.pallas_kernels.gemm.activation import Activation

SWIGLU = Activation("silu", gated=True)
CLAMPED = Activation("silu", gated=True, clamp=1.0, alpha=1.702)


def store_slots(ref, value, slot, column) -> None:
    """As the kernel's function of this name."""
    columns, rows = value.shape
    ref[pl.ds(slot, rows), pl.ds(column, columns)] = value.T


def load_pairs(pairs, weights, slot, rows):
    """As the kernel's function of this name."""
    found = [pairs[slot + row] for row in range(rows)]
    return found, [weights[jnp.maximum(pair, 0)] for pair in found]


def store_pairs(ref, value, pairs, weights, column) -> None:
    """As the kernel's function of this name."""
    columns, _ = value.shape
    for row, (pair, weight) in enumerate(zip(pairs, weights, strict=True)):

        @pl.when(pair >= 0)
        def _(row=row, pair=pair, weight=weight):
            target = ref.at[pair % ref.shape[0], pair // ref.shape[0]]
            target[pl.ds(column, columns)] = value[:, row] * weight


STAND_INS = (store_slots, load_pairs, store_pairs)
"""Of functions that emit MLIR."""


def problem(T, J, X, D, F, seed=0, skew=False):
    draw = np.random.default_rng(seed)
    h = jnp.asarray(draw.normal(size=(T, D)), jnp.bfloat16)
    up = jnp.asarray(draw.normal(size=(J, D, 2, F)) / D**0.5, jnp.bfloat16)
    down = jnp.asarray(draw.normal(size=(J, F, D)) / F**0.5, jnp.bfloat16)
    chosen = np.stack([draw.permutation(J)[:X] for _ in range(T)]).astype(np.int32)
    if skew:
        chosen = np.tile(np.arange(X, dtype=np.int32), (T, 1))
        chosen[-1] = J
    return h, jnp.asarray(chosen), jnp.asarray(draw.random((T, X)), jnp.float32), up, down


@pytest.fixture
def interpreted(monkeypatch):
    for function in STAND_INS:
        monkeypatch.setattr(grouped_gemm, function.__name__, function)
    with interpreting(monkeypatch):
        yield


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=["swiglu", "clamped and biases"])
@pytest.mark.parametrize(
    ("T", "J", "X", "D", "F", "consumers", "ctas", "skew"),
    [
        (1, 4, 2, 128, 64, 1, 3, False),
        (9, 3, 2, 64, 128, 2, 2, False),
        (20, 5, 2, 128, 128, 1, 1, True),
    ],
)
def test_the_arithmetic_is_that_of_plain_jax(
    interpreted, T, J, X, D, F, consumers, ctas, skew, activation
):
    h, chosen, weights, up, down = problem(T, J, X, D, F, skew=skew)
    biased = activation.clamp is not None
    draw = np.random.default_rng(7)
    up_bias = jnp.asarray(draw.normal(size=(J, 2, F)), jnp.bfloat16) if biased else None
    down_bias = jnp.asarray(draw.normal(size=(J, D)), jnp.bfloat16) if biased else None
    of_kernel = activation.clamped if biased else None
    work = make_work_list(chosen, J)
    config = GroupedConfig(consumers, 64, 2, ctas, reuse=True)
    rows = h if T == 1 else h[work.slot_row]
    hidden = grouped_gemm.gate_up(rows, up, work, config, bias=up_bias, activation=of_kernel)
    halves = GroupedConfig(1, 64, 3, ctas, reuse=True)
    found = grouped_gemm.weighted_down(hidden, down, weights, work, halves, bias=down_bias).sum(0)
    arrays = h, chosen, weights, up, down
    wanted = base.experts(*arrays, activation, up_bias, down_bias).summands[0]
    live = np.asarray((chosen < J).all(1))
    np.testing.assert_allclose(found[live], wanted[live], rtol=2e-2, atol=2e-2)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("T", [1, 9])
@pytest.mark.parametrize("skew", [False, True])
def test_devices_with_whole_experts_add_up(interpreted, monkeypatch, T, skew):
    J, X = 4, 2
    plain_list = functools.partial(make_work_list, num_elsewhere=2)
    monkeypatch.setattr(work_list_mosaic, "make_work_list_mosaic", plain_list)
    h, chosen, weights, up, down = problem(T, J, X, 64, 128)
    if skew:  # all rows to the first device's experts, none to the second's
        chosen = jnp.tile(jnp.asarray([[1, 0]], jnp.int32), (T, 1))
    wanted = base.experts(h, chosen, weights, up, down, SWIGLU).summands[0]
    shares = []
    for first in (0, 2):
        own = jnp.where((chosen >= first) & (chosen < first + 2), chosen - first, 2)
        both = up[first : first + 2], down[first : first + 2]
        found = grouped_gemm.experts(h, own, weights, *both, num_elsewhere=2).summands
        assert found.shape == (1, T, 64)
        shares.append(found[0])
    np.testing.assert_allclose(sum(shares), wanted, rtol=2e-2, atol=2e-2)
    assert jnp.abs(wanted).max() > 0.1
    if skew:
        assert not np.asarray(shares[1]).any()


@pytest.mark.parametrize("T", [1, 64, 2048])
def test_whole_experts_of_a_device_lower_for_cuda(T):
    D, F, J, X, elsewhere = 2048, 768, 32, 8, 96
    struct = jax.ShapeDtypeStruct
    operands = (
        struct((T, D), jnp.bfloat16),
        struct((T, X), jnp.int32),
        struct((T, X), jnp.float32),
        struct((J, D, 2, F), jnp.bfloat16),
        struct((J, F, D), jnp.bfloat16),
    )
    traced = jax.jit(functools.partial(grouped_gemm.experts, num_elsewhere=elsewhere)).trace(
        *operands
    )
    assert traced.out_info.summands.shape == (1, T, D)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == (3 if T * X <= 1024 else 2)  # with the work list's


SHAPES = [(2048, 768, 128, 8), (4096, 1536, 128, 8), (4096, 14336, 8, 2), (2880, 2880, 32, 4)]


@pytest.mark.sample(4, 6)
@pytest.mark.parametrize(("D", "F", "J", "X"), SHAPES)
@pytest.mark.parametrize("T", [1, 7, 64, 300, 8192])
def test_lowers_for_cuda(D, F, J, X, T):
    struct = jax.ShapeDtypeStruct
    operands = (
        struct((T, D), jnp.bfloat16),
        struct((T, X), jnp.int32),
        struct((T, X), jnp.float32),
        struct((J, D, 2, F), jnp.bfloat16),
        struct((J, F, D), jnp.bfloat16),
    )
    traced = jax.jit(grouped_gemm.experts).trace(*operands)
    assert traced.out_info.summands.shape == (X, T, D)
    kernels = 3 if 1 < T * X <= 1024 and T > 1 else 2  # with that of the work list
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == kernels


@pytest.mark.parametrize("T", [1, 64, 512])
def test_biases_and_the_clamped_activation_lower(T):
    J, X, D, F = 32, 4, 2880, 2880
    struct = jax.ShapeDtypeStruct
    operands = (
        struct((T, D), jnp.bfloat16),
        struct((T, X), jnp.int32),
        struct((T, X), jnp.float32),
        struct((J, D, 2, F), jnp.bfloat16),
        struct((J, F, D), jnp.bfloat16),
        struct((J, 2, F), jnp.bfloat16),
        struct((J, D), jnp.bfloat16),
    )
    run = functools.partial(grouped_gemm.experts, activation=CLAMPED.clamped)
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == (3 if T == 64 else 2)


def test_refusals():
    assert grouped_gemm.refusal(2048, 768, jnp.bfloat16) is None
    assert "16-bit" in grouped_gemm.refusal(2048, 768, jnp.float32)
    assert "multiples of 64" in grouped_gemm.refusal(2048, 760, jnp.bfloat16)
    arrays = problem(2, 3, 1, 64, 96)
    with pytest.raises(ValueError, match="multiples of 64"):
        grouped_gemm.experts(*arrays)
    with pytest.raises(ValueError, match="h is float16"):
        grouped_gemm.experts(arrays[0].astype(jnp.float16), *problem(2, 3, 1, 64, 64)[1:])


def test_work_lists_that_the_kernel_refuses():
    assert work_list_mosaic.refusal(1024, 1024) is None
    assert "at most 1024" in work_list_mosaic.refusal(1025, 8)
    assert "at most 1024 for 1000 pairs" in work_list_mosaic.refusal(1000, 1025)
    assert "at most 8192 for 1 pairs" in work_list_mosaic.refusal(1, 10_000)
    with pytest.raises(ValueError, match="1032 pairs"):
        work_list_mosaic.make_work_list_mosaic(jnp.zeros((129, 8), jnp.int32), 128, 16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize(
    ("T", "X", "J", "R"),
    [
        (64, 8, 128, 8),
        (128, 8, 128, 16),
        (3, 2, 5, 8),
        (33, 7, 300, 8),
        (2, 1, 1024, 8),
        (200, 4, 32, 64),
    ],
)
def test_the_work_list_is_that_of_plain_jax(T, X, J, R, skew):
    draw = np.random.default_rng(T)
    chosen = jnp.asarray(draw.integers(0, 2 if skew else J + 1, (T, X)), jnp.int32)
    made = jax.jit(work_list_mosaic.make_work_list_mosaic, static_argnums=(1, 2))(chosen, J, R)
    want = make_work_list(chosen, J, R)
    count = int(want.num_tiles[0])
    assert int(made.num_tiles[0]) == count
    np.testing.assert_array_equal(made.tile_expert[:count], want.tile_expert[:count])
    np.testing.assert_array_equal(made.slot_pair, want.slot_pair)
    np.testing.assert_array_equal(made.pair_slot, want.pair_slot)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=["swiglu", "clamped and biases"])
@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize(
    ("T", "J", "X", "D", "F"),
    [(1, 128, 8, 2048, 768), (9, 5, 2, 576, 320), (64, 128, 8, 2048, 768), (700, 8, 2, 1024, 512)],
)
def test_on_a_gpu(T, J, X, D, F, skew, activation):
    h, chosen, weights, up, down = problem(T, J, X, D, F, skew=skew and T > 1)
    biased = activation.clamp is not None
    draw = np.random.default_rng(7)
    up_bias = jnp.asarray(draw.normal(size=(J, 2, F)), jnp.bfloat16) if biased else None
    down_bias = jnp.asarray(draw.normal(size=(J, D)), jnp.bfloat16) if biased else None
    of_kernel = activation.clamped if biased else None
    run = jax.jit(functools.partial(grouped_gemm.experts, activation=of_kernel))
    arrays = h, chosen, weights, up, down
    first, again = (run(*arrays, up_bias, down_bias).summands for _ in range(2))
    live = np.asarray((chosen < J).all(1))
    np.testing.assert_array_equal(first[:, live], again[:, live])
    found = np.asarray(first.sum(0))[live]
    want = np.asarray(base.experts(*arrays, activation, up_bias, down_bias).summands[0])[live]
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("routing", ["any", "one device", "none"])
@pytest.mark.parametrize(
    ("T", "J", "X", "D", "F"),
    [(1, 128, 8, 2048, 768), (64, 128, 8, 2048, 768), (700, 8, 2, 1024, 512)],
)
def test_whole_experts_of_devices_on_a_gpu(T, J, X, D, F, routing):
    h, chosen, weights, up, down = problem(T, J, X, D, F)
    half = J // 2
    if routing == "one device":
        chosen = jnp.tile(jnp.arange(X, dtype=jnp.int32), (T, 1))
    if routing == "none":
        chosen = jnp.full((T, X), J, jnp.int32)
    run = jax.jit(functools.partial(grouped_gemm.experts, num_elsewhere=half))
    # A slot that no pair fills has what was in memory before.
    jax.block_until_ready(jnp.full((64, 1 << 20), jnp.nan, jnp.float32))
    shares = []
    for first in (0, half):
        own = jnp.where((chosen >= first) & (chosen < first + half), chosen - first, half)
        both = up[first : first + half], down[first : first + half]
        shares.append(np.asarray(run(h, own, weights, *both).summands[0]))
    want = np.asarray(base.experts(h, chosen, weights, up, down, SWIGLU).summands[0])
    if routing != "any":
        assert not shares[1].any()
    if routing == "none":
        assert not shares[0].any()
        return
    assert np.linalg.norm(sum(shares) - want) / np.linalg.norm(want) < 1e-2
