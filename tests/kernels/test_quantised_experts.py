"""The grouped GEMM of weights in few bits: arithmetic in the interpreter, lowering, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_mosaic import interpreting
from test_grouped_gemm import CLAMPED, STAND_INS, SWIGLU, problem

from rjax.models.schemes import Scaled
from rjax.pallas_kernels.experts import base, grouped_gemm, work_list_mosaic
from rjax.pallas_kernels.experts.config import choose_config
from rjax.pallas_kernels.experts.grouped_weight import grouped_weight
from rjax.pallas_kernels.experts.work_list import make_work_list
from rjax.pallas_kernels.gemm.few_bits import upcast
from rjax.pallas_kernels.gemm.few_bits.interleaving import natural

SCHEMES = {
    "fp8": Scaled("fp8"),
    "fp8 blocks": Scaled("fp8", (128, 128)),
    "int8": Scaled("int8"),
    "int4": Scaled("int4", (1, 128), scale_dtype="bfloat16"),
    "int4 of 64": Scaled("int4", (1, 64), scale_dtype="bfloat16"),
    "int4 channels": Scaled("int4"),
    "mxfp4": Scaled("mxfp4", (1, 32), scale_dtype="uint8"),
}


def leaves_of(weight, scheme, a, seed=0):
    """The leaves of [J, inputs, outputs]; random ones of this shape for mxfp4."""
    J, inputs, outputs = weight.shape
    if scheme.values == "mxfp4":
        draw = np.random.default_rng(seed)
        codes = jnp.asarray(draw.integers(-8, 8, (J, outputs, inputs)), jnp.int4)
        exponents = draw.integers(122, 126, (J, outputs, inputs // 32))
        own = {"weight": codes, "weight_scale": jnp.asarray(exponents, jnp.uint8)}
    else:
        rows, columns = (
            np.gcd(block or size, size)
            for block, size in zip(scheme.block, (outputs // a, inputs), strict=True)
        )
        each = [
            scheme.quantise(weight[j].T.astype(jnp.float32), (int(rows), int(columns)))
            for j in range(J)
        ]
        own = {name: jnp.stack([one[name] for one in each]) for name in each[0]}
    if a > 1:
        own = {name: value.reshape(J, a, -1, *value.shape[2:]) for name, value in own.items()}
    return jax.vmap(scheme.for_experts.arrange)(own)


def load_fp8(tile, first, columns):
    """As the kernel's function of this name."""
    return natural(tile[...])[:, first : first + columns].astype(jnp.bfloat16)


def load_interleaved(tile, first, columns, zero_point, dtype):
    """As the kernel's function of this name."""
    assert zero_point is None
    return natural(tile[...])[:, first : first + columns].astype(dtype)


def load_scaled(tile, first, columns, scales, *, mxfp4):
    """As the kernel's function of this name."""
    value = natural(tile[...])[:, first : first + columns]
    size = columns // len(scales)
    parts = []
    for i, scale in enumerate(scales):
        part = value[:, i * size : (i + 1) * size].astype(jnp.int8)
        if mxfp4:
            bits = (part & 7).astype(jnp.float32)
            part = jnp.where(bits < 4, bits / 2, jnp.where(bits < 6, bits - 2, 2 * bits - 8))
            part = jnp.where(value[:, i * size : (i + 1) * size] < 0, -part, part)
            scale = jnp.exp2(scale.astype(jnp.float32) - 127)
        part = part.astype(jnp.float32) * scale.astype(jnp.float32)[:, None]
        parts.append(part.astype(jnp.bfloat16))
    return jnp.concatenate(parts, 1)


@pytest.fixture
def interpreted(monkeypatch):
    for function in STAND_INS:
        monkeypatch.setattr(grouped_gemm, function.__name__, function)
    monkeypatch.setattr(work_list_mosaic, "make_work_list_mosaic", make_work_list)
    for function in (load_fp8, load_interleaved, load_scaled):
        monkeypatch.setattr(upcast, function.__name__, function)
    with interpreting(monkeypatch):
        yield


def few_ctas(**shape):
    """A config of two CTAs with two stages."""
    return dataclasses.replace(choose_config(**shape), num_ctas=2, num_stages=2)


def operands(scheme, T, J, X, D, F, skew=False):
    h, chosen, weights, up, down = problem(T, J, X, D, F, skew=skew)
    up = leaves_of(up.reshape(J, D, 2 * F), scheme, 2)
    return h, chosen, weights, up, leaves_of(down, scheme, 1, seed=1)


def wanted(scheme, h, chosen, weights, up, down, activation=SWIGLU, *biases):
    (_, _, F, D), dequantise = up["weight"].shape, scheme.for_experts.dequantise
    run = functools.partial(
        base.experts,
        widen_up=lambda leaves: dequantise(leaves, D, h.dtype).reshape(D, 2, F),
        widen_down=lambda leaves: dequantise(leaves, F, h.dtype),
    )
    return run(h, chosen, weights, up, down, activation, *biases).summands[0]


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("name", "T", "J", "X", "D", "F", "skew", "activation"),
    [
        *((name, 3, 2, 1, 256, 128, False, SWIGLU) for name in SCHEMES),
        ("mxfp4", 1, 3, 2, 576, 64, False, CLAMPED),
        ("fp8", 1, 3, 2, 192, 64, False, CLAMPED),
        ("fp8 blocks", 9, 3, 2, 192, 64, True, SWIGLU),
        ("int4 of 64", 9, 3, 2, 320, 64, True, SWIGLU),
    ],
)
def test_the_arithmetic_is_that_of_dequantised_weights(
    interpreted, monkeypatch, name, T, J, X, D, F, skew, activation
):
    scheme = SCHEMES[name]
    h, chosen, weights, up, down = operands(scheme, T, J, X, D, F, skew)
    biases, clamped = (), None
    if activation.clamp is not None:
        draw = np.random.default_rng(7)
        shapes = (J, 2, F), (J, D)
        biases = tuple(jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in shapes)
        clamped = activation.clamped
    want = wanted(scheme, h, chosen, weights, up, down, activation, *biases)
    both = grouped_weight(scheme.values, up, 2), grouped_weight(scheme.values, down, 1)
    # The interpreter takes long for each CTA.
    monkeypatch.setattr(grouped_gemm, "choose_config", few_ctas)
    found = grouped_gemm.experts(h, chosen, weights, *both, *(biases or (None, None)), clamped)
    live = np.asarray((chosen < J).all(1))
    found, want = np.asarray(found.summands.sum(0))[live], np.asarray(want)[live]
    np.testing.assert_allclose(found, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())


def abstract(scheme, J, D, F):
    """The operands of the kernel for both products, as shapes."""
    sizes = {"J": J, "D": D, "A": 2, "I": F}
    found = []
    for inputs, outputs, matrices in (("D", "A I", 2), ("I", "D", 1)):
        leaves = {}
        for name, leaf in scheme.for_experts.leaves(inputs, outputs, sizes).items():
            shared = dict(leaf.blocks)
            shape = tuple(sizes[k] // shared.get(k, 1) for k in leaf.of_experts.letters.split())
            leaves[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        found.append((leaves, matrices))
    return found


def lowered(scheme, T, D, F, J, X, biased=False):
    struct = jax.ShapeDtypeStruct
    (up, _), (down, _) = abstract(scheme, J, D, F)
    biases = ((J, 2, F), (J, D)) if biased else ()

    def run(h, chosen, weights, up, down, *biases):
        both = grouped_weight(scheme.values, up, 2), grouped_weight(scheme.values, down, 1)
        activation = CLAMPED.clamped if biased else None
        return grouped_gemm.experts(
            h, chosen, weights, *both, *(biases or (None, None)), activation
        )

    traced = jax.jit(run).trace(
        struct((T, D), jnp.bfloat16),
        struct((T, X), jnp.int32),
        struct((T, X), jnp.float32),
        *(up, down),
        *(struct(shape, jnp.bfloat16) for shape in biases),
    )
    assert traced.out_info.summands.shape == (X, T, D)
    return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.sample(2, 3)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("T", [1, 64, 8192])
def test_qwen_lowers_for_cuda(name, T):
    text = lowered(SCHEMES[name], T, 2048, 768, 128, 8).as_text()
    assert text.count("mosaic_gpu_v2") == (3 if T == 64 else 2)  # with that of the work list


@pytest.mark.sample(2, 4)
@pytest.mark.parametrize("name", ["mxfp4", "fp8", "fp8 blocks", "int4 of 64"])
@pytest.mark.parametrize("T", [1, 7, 64, 512])
def test_gpt_oss_lowers_for_cuda(name, T):
    text = lowered(SCHEMES[name], T, 2880, 2880, 32, 4, biased=True).as_text()
    assert text.count("mosaic_gpu_v2") == (3 if T in (7, 64) else 2)  # with that of the work list


@pytest.mark.thorough
def test_refusals():
    assert grouped_gemm.refusal(2048, 768, jnp.bfloat16, ((1, 32), (128, 128), None)) is None
    assert "bfloat16" in grouped_gemm.refusal(2048, 768, jnp.float16, (None,))
    for block in ((1, 16), (1, 96), (32, 128), (128, 256)):
        assert "scales of" in grouped_gemm.refusal(2048, 768, jnp.bfloat16, (block,))
    h, chosen, weights, up, down = operands(SCHEMES["fp8"], 2, 3, 1, 64, 64)
    both = [grouped_weight("fp8", up, 2), grouped_weight("fp8", down, 1)]
    with pytest.raises(ValueError, match="bfloat16"):
        grouped_gemm.experts(h.astype(jnp.float16), chosen, weights, *both)


def test_stages_of_weights_in_few_bits():
    shape = {"tile_rows": 8, "tiles": 400, "num_experts": 128, "matrices": 2, "columns": 768}
    for bits, depth, block_k in (
        (8, 2048, 128),
        (4, 2048, 256),
        (4, 2880, 192),
        (8, 2880, 192),
        (4, 320, 64),
    ):
        config = choose_config(**shape, depth=depth, bits=bits)
        assert config.block_k == block_k and config.num_stages >= 3


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED], ids=["swiglu", "clamped and biases"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("T", "J", "X", "D", "F"),
    [(1, 128, 8, 2048, 768), (9, 5, 2, 576, 320), (64, 32, 4, 2880, 2880), (700, 8, 2, 1024, 512)],
)
def test_on_a_gpu(T, J, X, D, F, name, activation):
    scheme = SCHEMES[name]
    if name == "int4" and (D % 128 or F % 128):
        pytest.skip("groups of 128 do not divide the inputs")
    h, chosen, weights, up, down = operands(scheme, T, J, X, D, F)
    biases, clamped = (), None
    if activation.clamp is not None:
        draw = np.random.default_rng(7)
        shapes = (J, 2, F), (J, D)
        biases = tuple(jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in shapes)
        clamped = activation.clamped

    @jax.jit
    def run(h, chosen, weights, up, down, biases):
        both = grouped_weight(scheme.values, up, 2), grouped_weight(scheme.values, down, 1)
        return grouped_gemm.experts(h, chosen, weights, *both, *(biases or (None, None)), clamped)

    first, again = (run(h, chosen, weights, up, down, biases).summands for _ in range(2))
    np.testing.assert_array_equal(first, again)
    want = np.asarray(wanted(scheme, h, chosen, weights, up, down, activation, *biases))
    found = np.asarray(first.sum(0))
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < 1e-2
