"""Steps of few rows that are one kernel from one attention to the next, here in a plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.decode_step.roofline import DecodeCase
from bench.machine_code.lowered_step import kernels_of, lowered_step
from rjax.benchmarks.model_shapes import SHAPES
from rjax.build import plan_engine
from rjax.models import DecoderLayer, config_from_dict
from rjax.pallas_kernels.kernel import Kernel
from rjax.pallas_kernels.layer.post_attention_block.grid_barrier import GridBarrier
from rjax.pallas_kernels.pending import Partial
from rjax.worker.backend import choose_backend
from rjax.worker.kernels import Dispatcher
from rjax.worker.kernels.layer_problem import post_attention_problem
from tests.engine.test_few_rows import PlainForms, answers
from tests.engine.test_whole_layers import rms_norm

ROWS = (8, 16)


class PlainBlock:
    """A plain form of the kernel, and for which rows it was traced, with or without a next layer.

    The counters must be empty at the first layer of a step, and pass from layer to layer.
    """

    def __init__(self) -> None:
        self.traced: set[tuple[int, bool]] = set()
        self.kernel = Kernel(
            "plain.post_attention_block",
            "post_attention_block",
            "xla",
            lambda problem: None if problem.rows in ROWS else f"{problem.rows} rows",
            self._run,
        )

    def _run(self, problem, x, attended, w, barrier):
        self.traced.add((problem.rows, w.next_qkv is not None))
        E, F, *following = problem.columns
        assert (attended.shape[1], len(w.down)) == (E, F)
        assert following == ([] if w.next_qkv is None else [w.next_qkv.shape[1]])
        x = x + attended @ w.output
        gate, up = jnp.moveaxis(
            jnp.tensordot(rms_norm(x, w.mlp_norm, problem.eps), w.gate_up, 1), 1, 0
        )
        update = (jax.nn.silu(gate) * up) @ w.down
        barrier = GridBarrier(barrier.other, barrier.current)
        if w.next_qkv is None:
            return x, _halves(update), barrier
        x = x + update
        return x, _halves(rms_norm(x, w.next_norm, problem.eps) @ w.next_qkv), barrier


def _halves(value):
    return Partial(jnp.stack([value / 4, value * 0.75]), dtype=value.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_decode_steps": 4},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_answers_the_same(tiny, monkeypatch, options):
    block, forms = PlainBlock(), PlainForms(ROWS, fused=False)

    def choose(*arguments, **given):
        backend = forms.taken_by(choose_backend(*arguments, **given), given["model"])
        kernels = (block.kernel, *backend.dispatcher.kernels)
        return dataclasses.replace(backend, dispatcher=Dispatcher("xla", kernels))

    monkeypatch.setattr(plan_engine, "choose_backend", choose)
    _, got = answers(tiny, 9, **options)
    assert {(rows, last) for rows, last in block.traced if rows == 16} == {
        (16, True),
        (16, False),
    }
    monkeypatch.undo()
    assert answers(tiny, 9, **options)[1] == got


@pytest.mark.thorough
def test_a_step_of_few_rows_is_four_kernels_a_layer():
    lowered = lowered_step("qwen3-0.6b", DecodeCase(16, 512, 128))
    counts, names = {}, (b"post_attention_block", b"split_k_gemm")
    for count, module in kernels_of(lowered):
        name = next((name for name in names if name in module), b"other")
        counts[name] = counts.get(name, 0) + count
    # Rotation, attention and its merge are the others, with the last norm.
    assert counts == {b"post_attention_block": 28, b"split_k_gemm": 1, b"other": 3 * 28 + 1}


def _layer(**change):
    config = config_from_dict(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1} | change)
    return DecoderLayer(config, 0, jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"attention_bias": True}, "a bias besides that of qkv"),
        (
            {"mlp_bias": True, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            "a bias besides that of qkv",
        ),
        ({"hidden_act": "gelu"}, "a feed-forward without silu and a gate"),
        (SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 1}, "experts"),
    ],
)
def test_layers_that_have_no_such_kernel(change, obstacle):
    plain = _layer()
    assert post_attention_problem(plain, plain, rows=8, dtype=jnp.bfloat16).obstacle is None
    other = _layer(**change)
    for layers in ((other, None), (other, plain), (plain, other)):
        assert post_attention_problem(*layers, rows=8, dtype=jnp.bfloat16).obstacle == obstacle


def test_a_problem_has_the_columns_of_the_next_layer():
    layer = _layer()
    alone = post_attention_problem(layer, None, rows=8, dtype=jnp.bfloat16)
    both = post_attention_problem(layer, layer, rows=8, dtype=jnp.bfloat16)
    assert (alone.depth, alone.columns) == (1024, (2048, 3072))
    assert both.columns == (2048, 3072, 4096)
    assert np.isclose(both.eps, 1e-6)
