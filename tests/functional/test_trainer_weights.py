"""A trainer's own tree of weights, fused inside its program."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from rjax import functional
from rjax.models import load_model
from rjax.models.errors import CheckpointError
from rjax.models.loading.stored_model import stored_model
from tests.functional.programs import CONFIG, prepared, prompts, scored

FOLDER_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# Names and axes of Tunix's Llama, and a number that is no tensor.
MAPPING = {
    "embedder.input_embedding": ("model.embed_tokens.weight", "V D -> V D"),
    "layers.*.attn.q_proj.w": ("model.layers.*.self_attn.q_proj.weight", "D N H -> (N H) D"),
    "layers.*.attn.k_proj.w": ("model.layers.*.self_attn.k_proj.weight", "D N H -> (N H) D"),
    "layers.*.attn.v_proj.w": ("model.layers.*.self_attn.v_proj.weight", "D N H -> (N H) D"),
    "layers.*.attn.o_proj.w": ("model.layers.*.self_attn.o_proj.weight", "N H D -> D (N H)"),
    "layers.*.mlp.gate_proj.kernel": ("model.layers.*.mlp.gate_proj.weight", "D F -> F D"),
    "layers.*.mlp.up_proj.kernel": ("model.layers.*.mlp.up_proj.weight", "D F -> F D"),
    "layers.*.mlp.down_proj.kernel": ("model.layers.*.mlp.down_proj.weight", "F D -> D F"),
    "layers.*.input_layernorm.w": "model.layers.*.input_layernorm.weight",
    "layers.*.post_attention_layernorm.w": "model.layers.*.post_attention_layernorm.weight",
    "final_norm.w": "model.norm.weight",
    "step": None,
}


@functools.cache
def tensors():
    """A checkpoint of the tiny model, by Hugging Face's names."""
    setup, weights = prepared()
    model = nnx.merge(setup.graph, weights)
    rng = np.random.default_rng(0)
    shapes = stored_model(model, CONFIG, {}).expected.shapes(CONFIG)
    return {
        name: (rng.standard_normal(shape) / 4 + (len(shape) == 1)).astype(np.float32)
        for name, (shape,) in sorted(shapes.items())
    }


def trainer_tree():
    """The tensors as a trainer's nested tree, transposed and with heads in axes of their own."""
    table = []
    for name, target in MAPPING.items():
        tensor = target[0] if isinstance(target, tuple) else target
        if tensor is not None:
            table.append((re.compile(re.escape(tensor).replace(r"\*", r"(\d+)")), name))
    tree: dict = {"step": np.zeros((), np.int32)}
    for tensor, array in tensors().items():
        ((name, found),) = [(n, m) for p, n in table if (m := p.fullmatch(tensor))]
        if name.endswith(("q_proj.w", "k_proj.w", "v_proj.w")):
            array = array.T.reshape(32, -1, 8)
        elif name.endswith("o_proj.w"):
            array = array.T.reshape(4, 8, 32)
        elif name.endswith("kernel"):
            array = array.T
        *path, last = name.replace("*", "".join(found.groups())).split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = jnp.asarray(array)
    return tree


def test_a_fused_tree_is_the_loaded_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FOLDER_CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path), dtype=jnp.float32, progress=False).model
    setup, want = functional.prepare(loaded, max_context=64, page_size=8)
    fuse = jax.jit(functional.fuse_weights, static_argnums=0)
    by_name = fuse(setup, jax.tree.map(jnp.asarray, tensors()))
    mapped = jax.jit(lambda tree: functional.fuse_weights(setup, tree, MAPPING))(trainer_tree())
    tree = trainer_tree()
    del tree["step"]
    named = jax.jit(lambda tree: functional.fuse_weights(setup, tree, "tunix"))(tree)
    for found in (by_name, mapped, named):
        assert jax.tree.structure(found) == jax.tree.structure(want)
        for got, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            assert got.dtype == leaf.dtype
            np.testing.assert_array_equal(got, leaf)


@pytest.mark.thorough
def test_a_rollout_takes_a_trainer_s_tree():
    setup, _ = prepared()
    tokens, lengths = prompts(2)
    keys = jax.random.split(jax.random.key(0), 2)
    run = functools.partial(
        functional.rollout, setup, samples=2, max_new_tokens=3, temperature=0.0, mapping=MAPPING
    )
    out = jax.tree.map(np.asarray, jax.jit(run)(trainer_tree(), tokens, lengths, keys))
    weights = functional.fuse_weights(setup, jax.tree.map(jnp.asarray, tensors()))
    for a in range(2):
        want = scored(setup, weights, tokens[a], int(lengths[a]), out.tokens[a])
        np.testing.assert_allclose(out.logprobs[a], want, atol=2e-5)


def test_a_tree_that_does_not_fit_is_refused():
    setup, _ = prepared()
    given = dict(tensors())
    del given["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        functional.fuse_weights(setup, given)
    tokens, lengths = prompts(2)
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(CheckpointError, match=r"embedder\.input_embedding is no tensor"):
        functional.rollout(
            setup, trainer_tree(), tokens, lengths, keys, samples=2, max_new_tokens=3
        )
