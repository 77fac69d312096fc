"""Dense attention against the paged reference, half precision against single, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import jitted

from rjax import models
from rjax.models.rope import RopeConfig, rotary_tables
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.rope_and_cache.base import rotate

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_equals_the_paged_reference(window, cap):
    T, N, K, H = 19, 6, 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (T, N, H))
    k = jax.random.normal(keys[1], (T, K, H))
    v = jax.random.normal(keys[2], (T, K, H))
    positions = jnp.arange(T)
    rotary = rotary_tables(RopeConfig("default", 10000.0, 4), positions)
    spec = AttentionSpec(0.3, window, cap)

    found = models.DenseAttention().attend(0, q, k, v, rotary, spec)

    q, k = (rotate(x, rotary.cos, rotary.sin) for x in (q, k))
    page = [x.swapaxes(0, 1)[None] for x in (k, v)]
    table = jnp.zeros((T, 1), jnp.int32)
    expected, _ = paged_attention_reference(q, *page, table, positions, spec)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype):
    config = models.config_from_dict(TINY)
    exact = models.init_model(config)
    graph, _ = nnx.split(models.Decoder(config, dtype))
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.state(exact)))
    tokens = jnp.arange(30)

    def run(model):
        hidden, logits = jitted(model)(tokens, tokens)
        assert hidden.dtype == model.embedding.weight[...].dtype
        assert logits.dtype == jnp.float32
        return np.asarray(logits)

    expected = run(exact)
    error = np.linalg.norm(run(half) - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.03


def test_padding_rows_are_harmless():
    config = models.config_from_dict(TINY)
    model = models.init_model(config)
    tokens = jnp.arange(6)
    padded_tokens = jnp.concatenate([tokens, jnp.array([-1, 10**6])])
    padded_positions = jnp.concatenate([tokens, jnp.array([-1, -1])])
    plain, _ = jitted(model)(tokens, tokens)
    padded, _ = jitted(model)(padded_tokens, padded_positions)
    np.testing.assert_allclose(padded[:6], plain, rtol=1e-5, atol=1e-6)
    assert np.isfinite(padded).all()


@pytest.mark.thorough
def test_trains_over_a_batch():
    graph, state = nnx.split(models.init_model(models.config_from_dict(TINY)))
    tokens = jax.random.randint(jax.random.key(1), (3, 12), 0, 50)

    @jax.jit
    def loss(state, tokens):
        model = nnx.merge(graph, state)

        def one(row):
            hidden = model(row, jnp.arange(row.size), models.DenseAttention())
            scores = jax.nn.log_softmax(model.logits(hidden[:-1]))
            return -jnp.take_along_axis(scores, row[1:, None], 1).mean()

        return jax.vmap(one)(tokens).mean()

    value, gradient = jax.jit(jax.value_and_grad(loss))(state, tokens)
    assert value == pytest.approx(np.log(50), rel=0.05)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(gradient))
    lower = jax.tree.map(lambda x, g: x - 0.5 * g, state, gradient)
    assert loss(lower, tokens) < value
