"""Steps of one row whose layers are one kernel each, here in a plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bench.decode_step.roofline import DecodeCase
from bench.machine_code.lowered_step import kernels_of, lowered_step
from rjax.benchmarks.model_shapes import SHAPES
from rjax.build import plan_engine
from rjax.models import DecoderLayer, Rotary, config_from_dict
from rjax.pallas_kernels.gemm.few_bits.scaled_weight import ScaledWeight
from rjax.pallas_kernels.kernel import DeviceInfo, Kernel
from rjax.pallas_kernels.pending import reduced
from rjax.pallas_kernels.rope_and_cache.base import rotate
from rjax.worker.backend import choose_backend
from rjax.worker.kernels import Dispatcher
from rjax.worker.kernels.layer_problem import layer_problem
from tests.engine.test_few_rows import PlainForms, answers

ROWS = (1, 8, 16)


def rms_norm(x, weight, eps):
    """In plain JAX, in the dtype of x."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def _matrix(weight):
    """[inputs, outputs] in float32."""
    if isinstance(weight, ScaledWeight):
        return weight.dequantise().reshape(-1, weight.values.shape[-1]).T
    return weight.reshape(len(weight), -1)


class PlainLayer:
    """A plain form of the kernel, and whether it was called with words."""

    def __init__(self) -> None:
        self.words: list[bool] = []
        self.kernel = Kernel(
            "plain.layer",
            "decoder_layer",
            "xla",
            lambda problem: None if problem.rows == 1 else f"{problem.rows} rows",
            self._run,
        )

    def _run(
        self, problem, x, update, w, cos, sin, k_pages, v_pages, table, positions, slots, words
    ):
        self.words.append(words is not None)
        x = x if update is None else x + reduced(update)
        assert (w.qkv_bias, w.q_norm, w.k_norm) == (None,) * 3
        S, K, H = problem.page_size, problem.num_kv_heads, problem.head_dim
        qkv = rms_norm(x, w.attention_norm, problem.eps) @ _matrix(w.qkv)
        qkv = qkv.reshape(1, K, -1, H)
        q = rotate(qkv[:, :, :-2].reshape(1, -1, H), cos, sin).reshape(K, -1, H)
        k, v = rotate(qkv[:, :, -2], cos, sin), qkv[:, :, -1]
        page = jnp.where(slots[0] < 0, len(k_pages), slots[0] // S)
        place = page, slice(None), slots[0] % S
        k_pages = k_pages.at[place].set(k[0], mode="drop")
        v_pages = v_pages.at[place].set(v[0], mode="drop")
        keys, values = (
            pages[table[0]].swapaxes(0, 1).reshape(K, -1, H) for pages in (k_pages, v_pages)
        )
        scores = jnp.einsum("KGH,KSH->KGS", q, keys) * problem.score_scale
        seen = jnp.arange(scores.shape[-1]) <= positions[0]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        attended = jnp.einsum("KGS,KSH->KGH", weights, jnp.where(seen[:, None], values, 0))
        x = x + attended.reshape(1, -1) @ _matrix(w.output)
        both = rms_norm(x, w.mlp_norm, problem.eps) @ _matrix(w.gate_up)
        gate, up = jnp.split(both, 2, axis=1)
        return (
            x,
            (jax.nn.silu(gate) * up) @ _matrix(w.down),
            k_pages,
            v_pages,
            jnp.int32(len(self.words)),
        )


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_an_engine_answers_the_same(tiny, monkeypatch, at_once, quantization):
    layer, forms = PlainLayer(), PlainForms(ROWS, fused=True)

    def choose(*arguments, **options):
        backend = forms.taken_by(choose_backend(*arguments, **options), options["model"])
        kernels = (layer.kernel, *backend.dispatcher.kernels)
        return dataclasses.replace(backend, dispatcher=Dispatcher("xla", kernels))

    monkeypatch.setattr(plan_engine, "choose_backend", choose)
    _, got = answers(tiny, 1, num_decode_steps=at_once, quantization=quantization)
    assert layer.words == [False, True]  # traced for the first layer and for all others
    assert not any(rows == 1 for _, rows in forms.called)
    monkeypatch.undo()
    assert answers(tiny, 1, quantization=quantization)[1] == got


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(("rows", "kernels"), [(1, 28), (8, 0)])
def test_a_step_of_one_row_is_a_kernel_a_layer(rows, kernels):
    lowered = lowered_step("qwen3-0.6b", DecodeCase(rows, 0, 128))
    found = [count for count, module in kernels_of(lowered) if b"one_row_layer" in module]
    assert sum(found) == kernels
    if rows == 1:
        assert sum(count for count, _ in kernels_of(lowered)) == kernels + 1  # the last norm


def _problem(**change):
    config = config_from_dict(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1} | change)
    layer = DecoderLayer(config, 0, jnp.bfloat16)
    pages = jnp.zeros((1, 8, 64, 128), jnp.bfloat16)
    tables = Rotary(jnp.zeros((1, 64)), jnp.zeros((1, 64)))
    return layer_problem(layer, tables, pages, rows=1, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"hidden_act": "gelu"}, "a feed-forward without silu and a gate"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "a sliding window",
        ),
        (SHAPES["gpt-oss-20b"] | {"num_hidden_layers": 1}, "experts"),
        (SHAPES["deepseek-v2-lite"] | {"num_hidden_layers": 1}, "latent attention"),
    ],
)
def test_other_layers_say_what_keeps_it_away(change, obstacle):
    plain = _problem()
    assert plain.obstacle is None and plain.head_dim == 128
    other = _problem(**change)
    assert other.obstacle == obstacle
    dispatcher = Dispatcher.of("mosaic", DeviceInfo("gpu", 9.0))
    choice = dispatcher.choose(other)
    assert choice.kernel is None
    assert choice.refused == (("mosaic.one_row_layer", obstacle),)
