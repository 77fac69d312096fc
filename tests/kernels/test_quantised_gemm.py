"""The GEMMs of quantised weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting, load_interleaved, store_all, store_transposed
from quantised_weights import KINDS, error, weight_of, weight_spec

from rjax.pallas_kernels.gemm.few_bits import (
    interleaving,
    norm_quantise,
    quantised_gemm,
    quantised_rows,
    upcast,
)
from rjax.pallas_kernels.gemm.few_bits.config import GemmConfig, GemmShape, configs
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.base import add_rms_norm
from tests.crossed import crossed

# (W, X, E) of Llama-3-8B, Qwen2.5-3B and Qwen2.5-0.5B layers, and odd ones.
LAYERS = [
    (1, 6144, 4096),
    (1, 4096, 14336),
    (2, 14336, 4096),
    (1, 2560, 2048),
    (2, 11008, 2048),
    (1, 1152, 896),
    (2, 4864, 896),
    (1, 64, 128),
    (1, 320, 640),
]
ROWS = (1, 8, 16, 32, 64)
MANY_ROWS = (72, 128, 136, 520)  # one tile and several, the last one overlapping


def rows_of(T: int, E: int, dtype=jnp.bfloat16) -> jax.Array:
    values = np.random.default_rng(1).standard_normal((T, E), np.float32)
    return jnp.asarray(values * np.linspace(0.1, 3, T)[:, None], dtype)


def quantised_if_fp8(h: jax.Array, weight: ScaledWeight):
    """What multiplies the weight: a test of the GEMM gives both sides the same rows."""
    if not weight.is_fp8:
        return h
    return quantised_rows.quantise_rows_xla(h, grouped=weight.scale.ndim == 3)


def wanted(h, weight: ScaledWeight) -> np.ndarray:
    """float32, in plain arithmetic."""
    h = h if isinstance(h, jax.Array) else h.dequantise()
    with jax.default_matmul_precision("highest"):
        sums = np.asarray(
            jnp.einsum("te,wxe->wtx", h.astype(jnp.float32), weight.dequantise()), np.float64
        )
    return sums[0] if len(sums) == 1 else sums[0] / (1 + np.exp(-sums[0])) * sums[1]


def computed(h, weight: ScaledWeight) -> np.ndarray:
    if len(weight.values) == 2:
        return np.asarray(jax.jit(quantised_gemm.quantised_gate_up_gemm)(h, weight), np.float32)
    return np.asarray(jax.jit(quantised_gemm.quantised_gemm)(h, weight).summands).sum(0)


def limit_of(W: int, T: int = 1, kind: str = "") -> float:
    if T * W > 64 and kind.startswith("int4"):
        return 4e-3  # the weights are rounded to bfloat16
    return 1e-5 if W == 1 else 2.5e-3  # of a result that is rounded to bfloat16


@pytest.mark.sample(8, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layer", "T"), [((1, 6144, 4096), 1), ((2, 4864, 896), 64), ((2, 14336, 4096), 256)]
)
def test_lowers(kind, layer, T):
    h = jax.ShapeDtypeStruct((T, layer[2]), jnp.bfloat16)
    run = quantised_gemm.quantised_gemm if layer[0] == 1 else quantised_gemm.quantised_gate_up_gemm
    traced = jax.jit(run).trace(h, weight_spec(kind, *layer))
    traced.lower(lowering_platforms=("cuda",))
    [out] = jax.tree.leaves(traced.out_info)
    assert out.shape[-2:] == (T, layer[1])
    assert out.dtype == (jnp.float32 if layer[0] == 1 else jnp.bfloat16)


_MANY = [(kind, ((1, 256, 384), 136)) for kind in KINDS] + [
    *[
        (kind, ((2, 64, 256), 72))
        for kind in ("fp8", "fp8 blocks", "int8", "int4 interleaved zeros")
    ],
    ("int4", ((1, 64, 256), 72)),  # outputs that cannot be halved
]
_SMALL = crossed(KINDS, [((1, 192, 640), 1), ((2, 128, 512), 64)], 2)


@pytest.mark.sample(5, 2)
@pytest.mark.parametrize(
    ("kind", "case"),
    # The last two refill their pipeline stages.
    [*_SMALL, *_MANY, ("fp8", ((1, 256, 3328), 16)), ("int4 zeros", ((1, 256, 2304), 16))],
)
def test_arithmetic(kind, case, monkeypatch):
    layer, T = case
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(upcast, "load_interleaved", load_interleaved)
    weight = weight_of(kind, *layer)
    h = quantised_if_fp8(rows_of(T, layer[2]), weight)
    with interpreting(monkeypatch):
        found = computed(h, weight)
    assert error(found, wanted(h, weight)) < limit_of(layer[0], T, kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", [GemmConfig(1, 128, 3, 2), GemmConfig(3, 128, 1, 4)])
def test_any_config_computes_the_same(config, monkeypatch):
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    weight, h = weight_of("int4", 1, 192, 896), rows_of(8, 896)
    with interpreting(monkeypatch):
        partial = quantised_gemm.quantised_gemm(h, weight, config=config)
    assert partial.summands.shape[0] == config.split_k
    assert error(np.asarray(partial.summands).sum(0), wanted(h, weight)) < 1e-5


@pytest.mark.parametrize(("dtype", "pairs"), [(jnp.int4, 4), (jnp.int8, 2)])
def test_interleaved_values_are_where_the_threads_need_them(dtype, pairs):
    """The registers of the loads of ``upcast``, thread by thread, beside those that wgmma reads."""
    size = 8 * pairs  # inputs of a block, of which each of 4 threads has 2 * pairs in a word
    digits = [jnp.arange(64) // 8, jnp.arange(64) % 8]  # of each input's number
    moved = [interleaving.interleave(digit.astype(dtype)) for digit in digits]
    for before, after in zip(digits, moved, strict=True):
        np.testing.assert_array_equal(interleaving.natural(after).astype(int), before)
    high, low = (np.asarray(digit, int) for digit in moved)
    stored = (8 * high + low).reshape(64 // size, 4, 2 * pairs)  # block, thread, value of the word
    for block in range(64 // size):
        for thread in range(4):
            for pair in range(pairs):
                # wgmma k16 number pair // 2, columns 2 * thread and next, upper half if pair is odd
                first = size * block + 8 * pair + 2 * thread
                found = stored[block, thread, [pair, pair + pairs]]
                np.testing.assert_array_equal(found, [first, first + 1])


def test_unpacked_bits():
    """The arithmetic of ``upcast._unpack``: mask, flipped sign bit, exponent of 128, offset."""
    for zero in (-8, 0, 8):
        for value in range(-8, 8):
            biased = (value & 0xF) ^ 0x4308
            number = np.uint32(biased << 16).view(np.float32)
            offset = np.float32(jnp.bfloat16(zero) + 136)
            assert number - offset == value - zero


def test_quantised_rows(monkeypatch):
    monkeypatch.setattr(quantised_rows, "store_strided", store_all)
    h = rows_of(3, 768).at[1].set(0)
    with interpreting(monkeypatch):
        found = jax.jit(quantised_rows.quantise_rows)(h)
    want = quantised_rows.quantise_rows_xla(h)
    np.testing.assert_allclose(found.scale[0, :3], want.scale[0, :3], rtol=1e-6)
    assert error(np.asarray(found.dequantise()), np.asarray(want.dequantise())) < 1e-3
    for rows in (want, quantised_rows.quantise_rows_xla(h, grouped=True)):
        assert error(np.asarray(rows.dequantise()), np.asarray(h, np.float32)) < 0.03


def test_rows_are_quantised_first(monkeypatch):
    monkeypatch.setattr(quantised_gemm, "store_transposed", store_transposed)
    monkeypatch.setattr(quantised_rows, "store_strided", store_all)
    weight, h = weight_of("fp8", 1, 64, 256), rows_of(8, 256)
    with interpreting(monkeypatch):
        found = computed(h, weight)
    assert error(found, wanted(quantised_if_fp8(h, weight), weight)) < 1e-3


def test_dequantised_weights_agree_with_the_scheme():
    from rjax.models.schemes import Scaled

    scheme = Scaled("int4", (1, 128), zero_points=True, scale_dtype="bfloat16")
    weight = weight_of("int4 zeros", 1, 64, 256)
    leaves = {
        "weight": weight.values[0],
        "weight_scale": weight.scale[0],
        "weight_zero_point": weight.zero_points[0],
    }
    stored = scheme.arrange(leaves)
    assert (stored["weight"] != leaves["weight"]).any()
    found = scheme.dequantise(stored, 256, jnp.float32)
    np.testing.assert_array_equal(found.T, weight.dequantise()[0])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [8, 64])
def test_configs_fill_the_gpu(bits, rows):
    for W, X, E in LAYERS[:5]:
        shape = GemmShape(rows, W, X, E, bits, 8 if bits == 8 else 16)
        config = configs(shape, may_split=W == 1)[0]
        assert X % (64 * config.consumers) == 0 and E % config.block_k == 0
        assert X // (64 * config.consumers) * config.split_k >= 64  # CTAs; an H200 has 132 SMs


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("rows", [8, 16])
def test_warpgroups_that_take_turns_have_stages_of_their_own(rows, resident):
    taken = set()
    for W, X, E in LAYERS[:5]:
        shape = GemmShape(
            rows, W, X, E, 4, 16, interleaved=True, resident_row=resident, shares_sm=not resident
        )
        for config in configs(shape, may_split=W == 1):
            taken.add(config.stage_groups)
            assert config.num_stages % config.stage_groups == 0
            assert config.consumers * config.stage_groups <= 4
            assert config.stage_groups == 1 or W == 1
    assert taken == ({1, 2} if rows == 8 else {1})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"rows": 12}, "12 rows"),
        ({"depth": 192}, "64 x 192"),
        ({"outputs": 96}, "96 x 256"),
        ({"dtype": jnp.float16}, "float16"),
        ({"values": jnp.uint8}, "uint8"),
        ({"block": (1, 32)}, "1 x 32"),
        ({"block": (128, 128)}, "128 x 128 int4"),
        ({"values": jnp.float8_e4m3fn, "block": (1, 128)}, "1 x 128 fp8"),
        (
            {"values": jnp.float8_e4m3fn, "block": (128, 128), "zero_points": True},
            "zero points",
        ),
    ],
)
def test_what_the_kernel_does_not_take(change, found):
    given = dict(rows=8, depth=256, outputs=64, dtype=jnp.bfloat16, values=jnp.int4, block=(1, 128))
    assert quantised_gemm.refusal(**given) is None
    assert found in (quantised_gemm.refusal(**given | change) or "")


def test_wrong_rows_raise():
    weight = weight_of("int4", 1, 64, 256)
    with pytest.raises(ValueError, match="quantised rows with weights of int4"):
        quantised_gemm.quantised_gemm(quantised_rows.quantise_rows_xla(rows_of(8, 256)), weight)


@pytest.mark.parametrize("D", [4096, 896])
def test_quantising_lowers(D):
    x, weight = rows_of(16, D), rows_of(1, D)[0]
    update = Partial(jnp.zeros((4, 16, D), jnp.float32))
    for run, operands in (
        (quantised_rows.quantise_rows, (x,)),
        (norm_quantise.add_rms_norm_quantise, (x, update, weight, 1e-5)),
    ):
        traced = jax.jit(run, static_argnums=range(3, len(operands))).trace(*operands)
        traced.lower(lowering_platforms=("cuda",))
        *_, rows = traced.out_info if isinstance(traced.out_info, tuple) else (traced.out_info,)
        assert rows.values.shape == (16, D) and rows.scale.shape == (1, 16)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_against_float32(kind, number):
    layer = LAYERS[number]
    weight = weight_of(kind, *layer)
    # Three numbers of rows each; over all layers every one occurs.
    few = (ROWS[number % len(ROWS)], ROWS[(number + 2) % len(ROWS)])
    for T in (*few, MANY_ROWS[number % len(MANY_ROWS)]):
        h = quantised_if_fp8(rows_of(T, layer[2]), weight)
        first, again = computed(h, weight), computed(h, weight)
        np.testing.assert_array_equal(first, again)
        # fp8 wgmma keeps about 14 bits of 128 products.
        limit = max(limit_of(layer[0], T, kind), 1e-3 if weight.is_fp8 else 0)
        assert error(first, wanted(h, weight)) < limit, T


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("T", "E"), [(1, 4096), (64, 14336), (16, 896), (8, 256)])
def test_quantised_rows_on_a_gpu(T, E):
    h = rows_of(T, E).at[0, :7].set(0)
    found = jax.jit(quantised_rows.quantise_rows)(h)
    want = quantised_rows.quantise_rows_xla(h)
    np.testing.assert_allclose(found.scale[0, :T], want.scale[0, :T], rtol=1e-6)
    # A value between two fp8 numbers may be rounded either way.
    assert error(np.asarray(found.dequantise()), np.asarray(want.dequantise())) < 2e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("T", "D"), [(1, 4096), (16, 896)])
def test_norm_and_quantisation_on_a_gpu(T, D):
    x, weight = rows_of(T, D), rows_of(1, D)[0]
    update = Partial(jnp.asarray(np.random.default_rng(2).standard_normal((3, T, D), np.float32)))
    run = jax.jit(norm_quantise.add_rms_norm_quantise, static_argnums=3)
    residual, rows = run(x, update, weight, 1e-5)
    want_residual, normed = add_rms_norm(x, update, weight, 1e-5)
    np.testing.assert_array_equal(residual, want_residual)
    want = quantised_rows.quantise_rows_xla(normed).dequantise()
    assert error(np.asarray(rows.dequantise()), np.asarray(want)) < 1e-2
