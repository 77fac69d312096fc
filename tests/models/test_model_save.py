"""A saved model loads with equal weights: with every fused projection, in one file or several."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of

from rjax import models
from rjax.models.loading.save import ShardWriter

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard_bytes", [10_000_000, 9_000])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_a_saved_model_loads_as_itself(tmp_path, changes, shard_bytes):
    config = models.config_from_dict(TINY | changes)
    model = models.init_model(config, seed=3)
    models.save_model(model, config, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 10_000_000)

    loaded = models.load_model(tmp_path, dtype=None, progress=False)

    assert loaded.config == config
    assert loaded.folder == tmp_path
    expected, found = jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(loaded.model))
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    tokens = jnp.arange(17) * 5 % 96
    np.testing.assert_array_equal(logits_of(model, tokens), logits_of(loaded.model, tokens))


def test_saving_again_leaves_no_old_shards(tmp_path):
    config = models.config_from_dict(TINY)
    model = models.init_model(config)
    models.save_model(model, config, tmp_path, shard_bytes=9_000)
    models.save_model(model, config, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize(("shard_bytes", "files"), [(10_000_000, 1), (9_000, 5)])
def test_whoever_reads_the_folder_reads_its_weights(tmp_path, shard_bytes, files):
    config = models.config_from_dict(TINY)
    models.save_model(models.init_model(config), config, tmp_path, shard_bytes=shard_bytes)
    usual = (tmp_path / "config.json").stat().st_mode
    modes = [path.stat().st_mode for path in tmp_path.glob("*.safetensors")]
    assert modes == [usual] * len(modes) and len(modes) >= files


def test_a_file_that_cannot_be_written(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = ShardWriter(tmp_path, 1 << 20)
    writer.add("weight", np.zeros(1 << 17, np.uint8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=r"partial cannot be written: .* File too large"):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_runs_under_jit_with_flat_leaves():
    config = models.config_from_dict(TINY)
    graph, state = nnx.split(models.init_model(config, dtype="float32"))
    leaves, tree = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)

    @jax.jit
    def run(leaves, tokens):
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return model.logits(model(tokens, jnp.arange(tokens.size), models.DenseAttention()))

    tokens = jnp.arange(9)
    out = run(leaves, tokens)
    assert out.shape == (9, 96)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(run(leaves, tokens.at[8].set(50))[:8], out[:8], rtol=1e-5, atol=1e-6)
    assert not np.allclose(run(leaves, tokens.at[0].set(50))[8], out[8], atol=1e-3)
