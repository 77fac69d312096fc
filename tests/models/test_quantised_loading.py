"""Every format, in every kind of fused projection, against the weights that the file means."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quantised_files import FORMATS, write_quantised

from rjax import models
from rjax.models.schemes import UNQUANTISED

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
CONFIGS = {
    "llama": LLAMA,
    # Heads that are larger than a group, and do not divide one.
    "wide heads": LLAMA | {"head_dim": 48, "num_attention_heads": 2, "hidden_size": 96},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    # Blocks of scales that cross heads, and both parts of one; latents that end within a block.
    "latent": LLAMA
    | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "head_dim": None}
    | {"num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 160, "qk_nope_head_dim": 64}
    | {"qk_rope_head_dim": 32, "v_head_dim": 48, "n_routed_experts": 16, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32},
    "phi3": LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
}


def load(folder, **options):
    return models.load_model(folder, **{"dtype": "float32", "progress": False} | options)


def linears(model):
    found = nnx.iter_modules(model)
    return {path: linear for path, linear in found if isinstance(linear, models.Linear)}


SOME = ("awq", "gptq-v2-8bit", "w4a16-asym", "deepseek-fp8", "fp8-static")


@pytest.mark.sample(10, 3)
@pytest.mark.parametrize(
    ("config", "name"),
    [(config, name) for config in CONFIGS for name in FORMATS if config == "llama" or name in SOME],
)
def test_weights_are_those_that_the_file_means(tmp_path, config, name):
    values = {key: value for key, value in CONFIGS[config].items() if value is not None}
    quantised, plain = write_quantised(tmp_path, values, name)
    found, expected = load(quantised), load(plain)
    ours, theirs = linears(found.model), linears(expected.model)
    assert ours.keys() == theirs.keys()
    for path, linear in ours.items():
        assert linear.scheme != UNQUANTISED
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), theirs[path].weight_matrix(jnp.float32), str(path)
        )
    np.testing.assert_array_equal(
        found.model.embedding.weight[...], expected.model.embedding.weight[...]
    )
