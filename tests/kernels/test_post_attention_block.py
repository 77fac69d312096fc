"""The kernel of the post-attention block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gemm.gate_up_gemm import gate_up_gemm
from rjax.pallas_kernels.gemm.split_k_gemm import split_k_gemm
from rjax.pallas_kernels.layer.base import PostAttentionProblem
from rjax.pallas_kernels.layer.post_attention_block.grid_barrier import GridBarrier
from rjax.pallas_kernels.layer.post_attention_block.kernel import (
    PostAttentionWeights,
    post_attention_block,
    refusal,
)
from rjax.pallas_kernels.layer.post_attention_block.sizes import BlockSizes
from rjax.pallas_kernels.mosaic.emit import num_sms
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.add_rms_norm import add_rms_norm

EPS = 1e-6

# (T, D, E, F, Q): Llama-3-8B, Qwen2.5-3B, Qwen3-0.6B, Qwen2.5-0.5B, and a last layer
SHAPES = [
    (8, 4096, 4096, 14336, 6144),
    (16, 2048, 2048, 11008, 2560),
    (16, 1024, 2048, 3072, 4096),
    (16, 896, 896, 4864, 1152),
    (8, 4096, 4096, 14336, None),
    (8, 128, 64, 128, 64),
]


def arguments(T, D, E, F, Q):
    rng = np.random.default_rng(0)

    def array(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, jnp.bfloat16)

    weights = PostAttentionWeights(
        output=array(E, D, scale=E**-0.5),
        mlp_norm=1 + array(D, scale=0.1),
        gate_up=array(D, 2, F, scale=D**-0.5),
        down=array(F, D, scale=F**-0.5),
        next_norm=None if Q is None else 1 + array(D, scale=0.1),
        next_qkv=None if Q is None else array(D, Q, scale=D**-0.5),
    )
    return array(T, D), array(T, E), weights


def problem(T, D, *columns, dtype="bfloat16"):
    columns = tuple(n for n in columns if n is not None)
    return PostAttentionProblem(
        operation="post_attention_block", rows=T, dtype=dtype, depth=D, columns=columns, eps=EPS
    )


def shapes_of(*shape):
    return jax.eval_shape(lambda: (*arguments(*shape), GridBarrier.empty()))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "shape",
    [s if s in SHAPES[3:5] else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES],
)
def test_lowers(shape):
    run = functools.partial(post_attention_block, problem(*shape))
    traced = jax.jit(run).trace(*shapes_of(*shape))
    traced.lower(lowering_platforms=("cuda",))
    T, D, _, _, Q = shape
    x, found, _ = traced.out_info
    assert (x.shape, found.summands.shape[1:]) == ((T, D), (T, D if Q is None else Q))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ctas", [114, 132])
def test_units_are_all_steps_of_all_columns(shape, ctas):
    of_shape = problem(*shape)
    sizes = BlockSizes.of(of_shape.rows, of_shape.depth, of_shape.columns, ctas)
    for product in (sizes.output, sizes.gate_up, sizes.down, sizes.qkv):
        if product is not None:
            assert product.tiles * product.tile == product.columns
            beyond = product.splits * product.steps * product.step - product.depth
            assert 0 <= beyond < product.steps * product.step
            assert product.matrices == 2 or product.units <= ctas
    assert sizes.under_way <= sizes.weight_stages


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": 7}, "7 rows"),
        ({"rows": 32}, "32 rows"),
        ({"depth": 96}, "96"),
        ({"columns": (64, 100, 64)}, "100"),
        ({"columns": (64, 128, 32)}, "32"),
        ({"dtype": "float32"}, "float32"),
    ],
)
def test_what_the_kernel_does_not_take(change, why):
    taken = problem(8, 128, 64, 128, 64)
    assert refusal(taken) is None
    found = refusal(dataclasses.replace(taken, **change))
    assert found is not None
    assert why in found


def test_one_dtype():
    x, attended, weights = arguments(*SHAPES[-1])
    weights = dataclasses.replace(weights, down=weights.down.astype(jnp.float16))
    with pytest.raises(ValueError, match="but not down"):
        post_attention_block(problem(*SHAPES[-1]), x, attended, weights, GridBarrier.empty())


def _product(h, w, product):
    """Split-K partials of one matrix in the splits of the kernel."""
    size = product.steps * product.step
    parts = [slice(i * size, (i + 1) * size) for i in range(product.splits)]
    summands = [split_k_gemm(h[:, part], w[part], splits=1).summands for part in parts]
    return Partial(jnp.concatenate(summands), dtype=h.dtype)


def separate(x, attended, weights):
    """The same by the kernels of each part."""
    (T, D), E, F = x.shape, attended.shape[1], len(weights.down)
    Q = None if weights.next_qkv is None else weights.next_qkv.shape[1]
    sizes = BlockSizes.of(T, D, problem(T, D, E, F, Q).columns, num_sms())
    update = _product(attended, weights.output, sizes.output)
    x, h = add_rms_norm(x, update, weights.mlp_norm, EPS)
    update = _product(gate_up_gemm(h, weights.gate_up), weights.down, sizes.down)
    if sizes.qkv is None:
        return x, update.summands
    x, h = add_rms_norm(x, update, weights.next_norm, EPS)
    return x, _product(h, weights.next_qkv, sizes.qkv).summands


def test_the_counters_of_a_first_launch_are_not_equal():
    """XLA may give equal constants one buffer, and then a launch clears what it counts."""
    barrier = GridBarrier.empty()
    assert (barrier.current == 0).all()
    assert (barrier.other != 0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_separate_kernels(shape):
    x, attended, weights = arguments(*shape)
    run = jax.jit(functools.partial(post_attention_block, problem(*shape)))
    want = jax.jit(separate)(x, attended, weights)
    barrier = GridBarrier.empty()
    for _ in range(20):  # each launch takes the counters that the one before has emptied
        stream, found, barrier = run(x, attended, weights, barrier)
        np.testing.assert_array_equal(stream, want[0])
        np.testing.assert_array_equal(found.summands, want[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("shape", SHAPES[2:4])
def test_a_thousand_launches_in_one_program(shape):
    x, attended, weights = arguments(*shape)

    def step(_, carry):
        x, barrier = carry
        stream, found, barrier = post_attention_block(
            problem(*shape), x, attended, weights, barrier
        )
        small = found.summands.sum((0, 2))[:, None].astype(x.dtype)
        return jnp.tanh(stream + small), barrier

    def separately(_, x):
        stream, summands = separate(x, attended, weights)
        return jnp.tanh(stream + summands.sum((0, 2))[:, None].astype(x.dtype))

    found = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, step, (x, GridBarrier.empty()))[0])(x)
    want = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, separately, x))(x)
    np.testing.assert_array_equal(found, want)
    assert np.isfinite(np.asarray(want, np.float32)).all()
