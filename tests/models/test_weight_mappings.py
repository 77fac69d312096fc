"""The parameters of trainers are read as the tensors of a checkpoint."""

import numpy as np
import pytest
import trainers
from field_cases import BASES, of
from flax import nnx

from rjax.models import CheckpointError, config_from_dict
from rjax.models.adopting.mapping import NameMap, flat_items
from rjax.models.adopting.mappings import named_mapping
from rjax.models.adopting.reading import Reading
from rjax.models.adopting.staged import staged_tensors, tensors_on_host

FAMILIES = {
    "Llama": BASES["LlamaForCausalLM"],
    "Qwen2": of("Qwen2", num_hidden_layers=2),
    "Qwen3": of("Qwen3", head_dim=16),
    "Qwen3Moe": of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "Gemma2": of("Gemma2", num_hidden_layers=4, head_dim=16),
    "Gemma3": of("Gemma3", num_hidden_layers=14, head_dim=16),
}
TREES = {
    "tunix": trainers.tunix,
    "easydel": trainers.easydel,
    "maxtext": lambda tensors, config: trainers.maxtext(tensors, config, scanned=True),
    "maxtext, not scanned": lambda tensors, config: trainers.maxtext(tensors, config, False),
}


def read(weights, mapping, config=None):
    """The tensors that weights hold, by name."""
    names = NameMap(named_mapping(mapping, config))
    return dict(tensors_on_host(staged_tensors(flat_items(weights), names)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trainer", TREES)
def test_a_trainers_tree_holds_the_tensors_of_a_checkpoint(trainer, family):
    config = config_from_dict(FAMILIES[family])
    tensors = trainers.checkpoint(config)
    found = read(TREES[trainer](tensors, config), trainer.partition(",")[0], config)
    assert found.keys() == tensors.keys()
    exact = not trainer.startswith("maxtext") or family.startswith("Qwen")
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape, name
        assert np.allclose(
            found[name], tensor, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )


def test_the_text_model_of_a_model_with_vision_has_the_names_of_its_checkpoint():
    text = {k: v for k, v in FAMILIES["Qwen3"].items() if k != "architectures"}
    text |= {"model_type": "qwen3_vl_text", "rope_scaling": {"mrope_section": [4, 2, 2]}}
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    config = config_from_dict({**outer, "vision_config": {}})
    found = read(trainers.tunix(plain(config), config), "tunix", config)
    assert found.keys() == trainers.checkpoint(config).keys()
    assert "model.language_model.layers.0.mlp.up_proj.weight" in found


def plain(config):
    """Tensors of a checkpoint, with the names of a text model alone."""
    prefix = config.text_model.decoder
    tensors = trainers.checkpoint(config)
    return {name.replace(prefix, "model."): tensor for name, tensor in tensors.items()}


def test_a_users_mapping_is_a_table_or_a_function():
    weight = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    table = {
        "blocks.*.q": ("model.layers.*.q.weight", "D N H -> (N H) D"),
        "blocks.*.fused": [("a.*", Reading("A D -> D", at=(("A", 0),))), ("b.*", lambda x: x[1])],
        "step": None,
        "norm": "model.norm.weight",
    }
    state = nnx.State(
        {
            "blocks": {3: {"q": nnx.Param(weight), "fused": nnx.Param(weight[0])}},
            "norm": nnx.Param(weight[0, 0]),
            "step": nnx.Variable(np.zeros(())),
        }
    )
    found = read(state, table)
    assert np.array_equal(found["model.layers.3.q.weight"], weight.reshape(4, 6).T)
    assert np.array_equal(found["a.3"], weight[0, 0])
    assert np.array_equal(found["b.3"], weight[0, 1])
    assert np.array_equal(found["model.norm.weight"], weight[0, 0])
    assert found.keys() == {"model.layers.3.q.weight", "a.3", "b.3", "model.norm.weight"}
    items = [("x", weight), ("left.out", weight)]
    function = {"x": ("w", "A B C -> C B A"), "left.out": None}.get
    assert np.array_equal(read(items, function)["w"], weight.T)


def test_what_a_mapping_cannot_read_is_said():
    x = np.zeros((2, 3), np.float32)
    wrong = {
        "x is in no entry of the mapping": ([("x", x)], {"y": "z"}),
        "x has the shape (2, 3); the mapping reads it as 'A -> A', from 1 axes": (
            [("x", x)],
            {"x": ("y", "A -> A")},
        ),
        "has 2 entries in axis A of 'A B -> A B'; the model has 3": (
            [("x", x)],
            {"x": ("y", Reading("A B -> A B", first=(("A", 3),)))},
        ),
        "the pattern 'A B' of a mapping is malformed": ([("x", x)], {"x": ("y", "A B")}),
        "x has 3 in the mapping": ([("x", x)], {"x": 3}),
        "x cannot be transformed by the mapping: division": (
            [("x", x)],
            {"x": ("y", lambda array: 1 / 0)},
        ),
        "b holds y, and so does a": ([("a", x), ("b", x)], {"a": "y", "b": "y"}),
        "mapping is 'orbax'; it must be one of tunix, easydel, maxtext": ([], "orbax"),
        "mapping is int; give the name of a built-in mapping": ([], 3),
        "x is str; give a NumPy or JAX array": ([("x", "array")], None),
        "the weights are int; give a tree of arrays": (3, None),
        "the weights hold str; give a tree of arrays": (["xy"], None),
    }
    for message, (items, mapping) in wrong.items():
        with pytest.raises(CheckpointError) as caught:
            read(items, mapping)
        assert message in str(caught.value)
