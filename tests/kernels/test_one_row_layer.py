"""A whole decoder layer of one row in one launch, beside plain JAX with the same roundings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.layer.base import LayerProblem
from rjax.pallas_kernels.layer.one_row.kernel import PartialSumBuffer, decoder_layer, refusal
from rjax.pallas_kernels.layer.one_row.sizes import LayerSizes
from rjax.pallas_kernels.layer.one_row.weights import LayerWeights
from rjax.pallas_kernels.mosaic.words import EMPTY
from rjax.pallas_kernels.pending import Partial
from tests.kernels.quantised_weights import weight_of

EPS, HEAD_EPS, SPLITS = 1e-6, 1e-5, 3


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a model, and whether it has norms of heads or biases."""

    D: int
    N: int
    K: int
    H: int
    F: int
    head_norms: bool = False
    bias: bool = False

    def sizes(self, bits: int = 16) -> LayerSizes:
        """As on an H200; bits: of a weight."""
        return LayerSizes(self.D, self.N, self.K, self.H, self.F, 132, bits)

    def problem(self, **change) -> LayerProblem:
        """The problem of a layer in 16 bits."""
        problem = LayerProblem(
            operation="decoder_layer",
            rows=1,
            dtype="bfloat16",
            depth=self.D,
            width=self.F,
            num_heads=self.N,
            num_kv_heads=self.K,
            head_dim=self.H,
            rotary_dim=self.H,
            page_size=64,
            kv_dtype="bfloat16",
            eps=EPS,
            head_eps=HEAD_EPS,
        )
        return dataclasses.replace(problem, **change)


MODELS = {
    "qwen3-0.6b": Layer(1024, 16, 8, 128, 3072, head_norms=True),
    "qwen3-4b": Layer(2560, 32, 8, 128, 9728, head_norms=True),
    "qwen2.5-0.5b": Layer(896, 14, 2, 64, 4864, bias=True),
    "qwen2.5-3b": Layer(2048, 16, 2, 128, 11008, bias=True),
    "llama-3.2-1b": Layer(2048, 32, 8, 64, 8192),
    "llama-3-8b": Layer(4096, 32, 8, 128, 14336),
}
POSITIONS = (0, 1, 63, 64, 100, 1023, 1024, 3000)
FEW_BITS = (
    *(("fp8", name) for name in ("qwen2.5-0.5b", "qwen3-0.6b", "llama-3-8b")),
    *(("fp8 blocks", name) for name in ("qwen2.5-3b", "llama-3.2-1b")),
    *(("int8", name) for name in ("qwen2.5-0.5b", "qwen3-4b")),
    *(("int4 interleaved", name) for name in ("qwen3-0.6b", "qwen2.5-3b", "llama-3-8b")),
    *(("int4 interleaved zeros", name) for name in ("qwen3-4b", "llama-3-8b")),
)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        (name, bits)
        for name, layer in MODELS.items()
        for bits in (16, 8, 4)
        if layer.D % (1024 // bits) == 0  # others are refused
    ],
)
def test_every_unit_has_work_and_words_do_not_overlap(name, bits):
    sizes = MODELS[name].sizes(bits)
    for product in (sizes.qkv, sizes.output, sizes.gate_up, sizes.down):
        assert 1 <= product.splits <= product.steps
        rounds = -(-product.units // sizes.ctas)
        assert product.units > (rounds - 1) * sizes.ctas * 0.6, "too few units in the last round"
        columns = [first for tile in range(product.tiles) for first in product.first_columns(tile)]
        assert sorted(columns) == list(range(0, product.matrices * product.columns, 64))
    assert sizes.N // sizes.output.splits * sizes.H % sizes.output.step == 0
    assert sizes.heads * sizes.passes * sizes.K == sizes.N
    assert sizes.K * sizes.passes * sizes.kv_splits <= sizes.ctas
    firsts = (
        *(sizes.qkv_words, sizes.attention_words, sizes.output_words),
        *(sizes.gate_up_words, sizes.words),
    )
    assert list(firsts) == sorted(set(firsts)) and all(first % 4 == 0 for first in firsts)


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize(("kind", "name"), [*((None, name) for name in MODELS), *FEW_BITS])
def test_lowers_for_cuda(kind, name):
    abstract = jax.eval_shape(lambda: _arguments(MODELS[name], 0, pages=2, kind=kind))
    lowered = _run.trace(*abstract, scale=0.1).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_a_layer_behind_one_with_other_bits_has_words_of_its_own():
    layer = MODELS["qwen3-0.6b"]
    problem = layer.problem(values="fp8")
    assert refusal(problem) is None

    def run():
        *arguments, _ = _arguments(layer, 0, pages=2, kind="fp8")
        words = PartialSumBuffer.empty(layer.sizes(16))
        return decoder_layer(problem, *arguments, words)

    *_, words = jax.eval_shape(run)
    assert words.current.shape == (layer.sizes(8).words,) != (layer.sizes(16).words,)


def _sizes(D, N, K, H, F):
    names = ("depth", "num_heads", "num_kv_heads", "head_dim", "width", "rotary_dim")
    return dict(zip(names, (D, N, K, H, F, H), strict=True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 2}, "2 rows; it takes one"),
        ({"kv_dtype": "float8_e4m3fn"}, "KV in float8_e4m3fn"),
        ({"head_dim": 96}, "heads of 96 dims"),
        ({"rotary_dim": 64}, "64 rotated"),
        ({"page_size": 32}, "pages of 32 tokens; it takes 64"),
        ({"width": 100}, "columns; it takes multiples of 128"),
        ({"num_kv_heads": 256, "num_heads": 256}, "256 KV heads leave 0 CTAs"),
        (_sizes(3584, 28, 4, 128, 18944), "leave 4 CTAs"),  # Qwen2.5-7B: 7 heads a group
        (_sizes(384, 6, 3, 64, 1024), "most of which would"),
        ({"depth": 32768}, "too little shared memory"),
        ({"values": "mxfp4"}, "weights in mxfp4; it takes fp8, int8, int4"),
        ({"values": "int4", "group": 64}, "scales of 64 inputs; it takes multiples of 128"),
        ({"values": "fp8", "group": 128, "zero_points": True}, "fp8 weights with zero points"),
        ({"values": "int4", "zero_points": True}, "it takes those of groups of int4"),
        (
            {"values": "int4", "group": 128, **_sizes(896, 14, 2, 128, 3072)},
            "multiples of 256",
        ),
    ],
)
def test_refusals(change, why):
    layer = MODELS["qwen3-0.6b"]
    assert refusal(layer.problem()) is None
    assert why in str(refusal(layer.problem(**change)))


@pytest.mark.gpu
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_jax(name, position):
    _compare(name, position)


def test_the_words_of_a_first_launch_are_not_equal():
    """XLA may give equal constants one buffer, and then a launch empties what it sends."""
    words = PartialSumBuffer.empty(MODELS["qwen3-0.6b"].sizes())
    assert (words.current == EMPTY).all()
    assert (words.other != EMPTY).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3-8b"])
def test_in_a_program_that_slices_its_operands_from_one_array(name):
    """As a step of the engine does: XLA makes one fusion of the kernel and the slices."""
    layer = MODELS[name]
    *arguments, table, position, slot, words = _arguments(layer, 100)
    packed = jnp.concatenate([position, slot, table[0]])

    def two_layers(packed, x, update, weights, cos, sin, *pools, words=None):
        words = PartialSumBuffer.empty(layer.sizes()) if words is None else words
        for _ in range(2):
            operands = weights, cos, sin, *pools, packed[None, 2:], packed[0:1], packed[1:2]
            x, update, *pools, words = _run(x, update, *operands, words, scale=0.1)
            update = Partial(update[None], dtype=x.dtype)
        return x, update.summands, *pools

    expected = two_layers(packed, *arguments, words=words)
    found = jax.jit(two_layers)(packed, *arguments)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(
            np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("position", [100, 1024])
@pytest.mark.parametrize(("kind", "name"), FEW_BITS)
def test_few_bit_weights_equal_plain_jax(kind, name, position):
    _compare(name, position, kind)


def _compare(name, position, kind=None):
    layer = MODELS[name]
    arguments = _arguments(layer, position, kind=kind)
    *arguments, words = arguments
    expected, found = _reference(*arguments, scale=layer.H**-0.5), []
    for _ in range(2):  # with both words
        *result, words = _run(*arguments, words, scale=layer.H**-0.5)
        assert (words.current == EMPTY).all()
        found.append(jax.tree.map(np.asarray, result))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))
    for got, want, bound in zip(found[0], expected, (0.02, 0.02, 0.0, 0.0), strict=True):
        # Roundings of a value that the other sum puts on the other side: a step of bfloat16.
        assert _error(got, want) <= max(bound, 2.0**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_ten_thousand_random_steps(name):
    """KV behind the position is NaN, and so are pages of others; every step is checked."""
    layer, scale = MODELS[name], MODELS[name].H ** -0.5
    x, _, weights, _, _, k_pages, v_pages, *_ = _arguments(layer, 0)
    P, M = len(k_pages), 20
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)

    def step(i, state):
        words, worst = state
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), i), 6)
        position = jax.random.randint(keys[0], (), 0, 64 * M)
        table = jax.random.permutation(keys[1], P)[None, :M].astype(jnp.int32)
        place = jnp.full(P, M).at[table[0]].set(jnp.arange(M))
        old = place[:, None, None, None] * 64 + jnp.arange(64)[:, None] < position
        pools = [jnp.where(old, normal(key, k_pages.shape), jnp.nan) for key in keys[2:4]]
        slot = table[0, position // 64] * 64 + position % 64
        angles = position / 10000 ** (jnp.arange(layer.H // 2) / (layer.H // 2))
        update = Partial(normal(keys[4], (SPLITS, *x.shape)).astype(jnp.float32), dtype=x.dtype)
        arguments = (normal(keys[5], x.shape), update, weights)
        arguments += (jnp.cos(angles)[None], jnp.sin(angles)[None], *pools, table)
        arguments += (position[None], slot[None])
        *found, words = _run(*arguments, words, scale=scale)
        expected = _reference(*arguments, scale=scale)
        pairs = zip(found, expected, strict=True)
        return words, jnp.maximum(worst, jnp.stack([_error(*pair) for pair in pairs]))

    run = jax.jit(lambda words: jax.lax.fori_loop(0, 10_000, step, (words, jnp.zeros(4)))[1])
    worst = np.asarray(run(PartialSumBuffer.empty(layer.sizes())))
    assert (worst <= [0.03, 0.03, 2.0**-6, 2.0**-6]).all(), worst


def _error(found, expected):
    """The largest difference, of the largest number; infinite where one is NaN and one is not."""
    found, expected = (jnp.asarray(each, jnp.float32) for each in (found, expected))
    nan = jnp.isnan(expected)
    difference = jnp.where(nan, 0, jnp.abs(found - expected))
    difference = jnp.where(nan == jnp.isnan(found), difference, jnp.inf)
    return difference.max() / jnp.where(nan, 0, jnp.abs(expected)).max()


@pytest.mark.gpu
def test_padding_writes_no_kv():
    arguments = list(_arguments(MODELS["qwen3-0.6b"], 0))
    arguments[8], arguments[9] = jnp.array([-1], jnp.int32), jnp.array([-1], jnp.int32)
    *_, k_pages, v_pages, _ = _run(*arguments, scale=0.1)
    np.testing.assert_array_equal(*(np.isnan(np.asarray(x)) for x in (k_pages, arguments[5])))
    np.testing.assert_array_equal(*(np.isnan(np.asarray(x)) for x in (v_pages, arguments[6])))


def _arguments(layer: Layer, position: int, pages: int = 64, kind: str | None = None):
    """Of `_run`; KV that no token of the sequence wrote is NaN. kind: of few-bit weights."""
    draw = iter(jax.random.split(jax.random.key(position), 32))

    def normal(*shape, scale=1.0):
        value = jax.random.normal(next(draw), shape, jnp.float32) * scale
        return value.astype(jnp.bfloat16)

    D, N, K, H, F = layer.D, layer.N, layer.K, layer.H, layer.F
    A = N // K + 2
    weights = LayerWeights(
        1 + normal(D, scale=0.1),
        1 + normal(D, scale=0.1),
        normal(D, K, A, H, scale=D**-0.5),
        normal(K, A, H) if layer.bias else None,
        1 + normal(H, scale=0.1) if layer.head_norms else None,
        1 + normal(H, scale=0.1) if layer.head_norms else None,
        normal(N * H, D, scale=(N * H) ** -0.5),
        normal(D, 2, F, scale=D**-0.5),
        normal(F, D, scale=F**-0.5),
    )
    bits = 16
    if kind is not None:
        shapes = {"qkv": (1, K * A * H, D), "output": (1, D, N * H)}
        shapes |= {"gate_up": (2, F, D), "down": (1, D, F)}
        few = {name: weight_of(kind, *shape) for name, shape in shapes.items()}
        weights, bits = dataclasses.replace(weights, **few), few["qkv"].bits
    count = position // 64 + 1
    table = 1 + jax.random.permutation(next(draw), pages - 1)[:count].astype(jnp.int32)
    table = jnp.zeros((1, max(count, 4)), jnp.int32).at[0, :count].set(table[:count])
    pools = []
    for _ in range(2):
        pool = jnp.full((pages, K, 64, H), jnp.nan, jnp.bfloat16)
        tokens = normal(count, 64, K, H).swapaxes(1, 2)
        old = jnp.arange(count * 64).reshape(count, 1, 64, 1) < position
        pools.append(pool.at[table[0, :count]].set(jnp.where(old, tokens, jnp.nan)))
    angles = position / 10000 ** (jnp.arange(H // 2) / (H // 2))
    slot = table[0, position // 64] * 64 + position % 64
    return (
        *(normal(1, D), Partial(normal(SPLITS, 1, D).astype(jnp.float32), dtype=jnp.bfloat16)),
        *(weights, jnp.cos(angles)[None], jnp.sin(angles)[None], *pools, table),
        *(jnp.array([position], jnp.int32), slot[None].astype(jnp.int32)),
        PartialSumBuffer.empty(layer.sizes(bits)),
    )


@functools.partial(jax.jit, static_argnames="scale")
def _run(*arguments, scale):
    x, _, weights, _, _, k_pages, *_ = arguments
    problem = _problem(x, weights, k_pages, scale)
    residual, found, *rest = decoder_layer(problem, *arguments)
    return residual, found.summands.sum(0), *rest


def _problem(x, weights, k_pages, scale) -> LayerProblem:
    _, K, _, H = k_pages.shape
    few = isinstance(weights.qkv, ScaledWeight)
    E, F = (w.values.shape[2] if few else len(w) for w in (weights.output, weights.down))
    layer = Layer(x.shape[1], E // H, K, H, F)
    if not few:
        return layer.problem(score_scale=scale)
    qkv = weights.qkv
    return layer.problem(
        score_scale=scale,
        values="fp8" if qkv.is_fp8 else qkv.values.dtype.name,
        group=None if qkv.scale.ndim == 2 else qkv.block[1],
        zero_points=qkv.zero_points is not None,
    )


@functools.partial(jax.jit, static_argnames="scale")
def _reference(x, update, w, cos, sin, k_pages, v_pages, table, positions, slots, scale):
    """(residual, update, K pages, V pages), in float32 with the roundings of separate kernels."""
    f32, bf16 = jnp.float32, jnp.bfloat16

    def normed(value, weight, eps):
        value = value.astype(f32)
        mean = jnp.mean(value * value, -1, keepdims=True)
        return (value * jax.lax.rsqrt(mean + eps) * weight.astype(f32)).astype(bf16)

    def product(row, weight):
        if isinstance(weight, ScaledWeight):
            flat = weight.dequantise().reshape(-1, row.shape[-1]).T
        else:
            flat = weight.reshape(row.shape[-1], -1).astype(f32)
        return jnp.dot(row.astype(f32), flat, precision="highest")

    def rotated(heads):
        a, b = jnp.split(heads.astype(f32), 2, -1)
        return jnp.concatenate([a * cos[0] - b * sin[0], b * cos[0] + a * sin[0]], -1).astype(bf16)

    x = (x.astype(f32) + update.summands.sum(0).astype(bf16).astype(f32)).astype(bf16)
    _, K, _, H = k_pages.shape
    qkv = product(normed(x, w.attention_norm, EPS), w.qkv).astype(bf16).reshape(K, -1, H)
    if w.qkv_bias is not None:
        qkv = (qkv.astype(f32) + w.qkv_bias.astype(f32)).astype(bf16)
    q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
    if w.q_norm is not None:
        q, k = normed(q, w.q_norm, HEAD_EPS), normed(k, w.k_norm, HEAD_EPS)
    q, k = rotated(q), rotated(k)
    page, offset = jnp.divmod(slots[0], 64)
    k_pages, v_pages = k_pages.at[page, :, offset].set(k), v_pages.at[page, :, offset].set(v)
    seen = jnp.arange(table.shape[1] * 64) <= positions[0]
    keys, values = (
        jnp.where(seen[:, None, None], pages[table[0]].swapaxes(1, 2).reshape(-1, K, H), 0)
        for pages in (k_pages, v_pages)
    )
    keys, values = keys.astype(f32), values.astype(f32)
    scores = jnp.einsum("KGH,SKH->KGS", q.astype(f32), keys, precision="highest") * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    attended = jnp.einsum("KGS,SKH->KGH", jax.nn.softmax(scores), values, precision="highest")
    output = product(attended.astype(bf16).reshape(1, -1), w.output)
    x = (x.astype(f32) + output.astype(bf16).astype(f32)).astype(bf16)
    gate, up = product(normed(x, w.mlp_norm, EPS), w.gate_up).reshape(2, 1, -1)
    hidden = (jax.nn.silu(gate) * up).astype(bf16)
    return x, product(hidden, w.down), k_pages, v_pages
