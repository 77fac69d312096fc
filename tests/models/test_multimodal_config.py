"""config.json of an architecture with towers means what it means to transformers."""

import json
from typing import Any

import pytest
import transformers_fields
from field_cases import CHANGES, FULL, MIXED, YARN
from multimodal_cases import NAMES, config_of
from transformers import AutoConfig

from rjax import models
from rjax.models.families import FAMILIES, TEXT_FAMILIES
from rjax.models.families.multimodal_models import MULTIMODAL
from rjax.models.loading.config import unknown_fields

NOT_OF_A_FAMILY = {"architectures", "quantization_config", "dtype", "torch_dtype"}
OUTER = {"tie_word_embeddings"}
HAS_SIZES = {"Gemma3", "Gemma4", "Gemma4Unified"}  # by default
TIED_BY_DEFAULT = HAS_SIZES | {"Mistral3"}
TEXT_TIES = {"Qwen2VL", "Qwen2_5_VL", "Glm4v", "Glm4vMoe"}
NEW_TEXTS = sorted(
    {text.architecture for family in MULTIMODAL for text in family.texts} - TEXT_FAMILIES.keys()
)
# Beside which a field matters, and values that differ from the defaults.
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
BESIDE = {
    "sliding_window": WINDOWS,
    "max_window_layers": WINDOWS | {"max_window_layers": 0},
    "layer_types": WINDOWS,
    "use_sliding_window": WINDOWS,
    "intermediate_size": {"mlp_only_layers": [1], "first_k_dense_replace": 1},
    "topk_group": {"n_group": 2},
    "num_key_value_heads": {"num_attention_heads": 32, "hidden_size": 512},  # any default divides
    "rope_theta": {"rope_theta": None},
    "linear_num_key_heads": {"linear_num_value_heads": 32},  # which any default divides
    "original_max_position_embeddings": {
        "rope_scaling": {name: YARN[name] for name in ("rope_type", "factor")}
    },
}
OTHER = CHANGES | {
    "head_dim": 32,
    "layer_types": MIXED[:2],
    "num_hidden_layers": 1,
    "rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 3, 3]},
    "mlp_only_layers": [0],
    "num_key_value_heads": 4,
    "num_experts": 5,
    "num_local_experts": 5,
    "rope_theta": 7e5,
    "sliding_window_pattern": 2,
}
OTHER_OF = {
    **{
        (name, field): value
        for name in ("Qwen3_5", "Qwen3_5Moe")
        for field, value in (
            ("layer_types", ["linear_attention", "full_attention"] * 2),
            ("num_hidden_layers", 5),
        )
    },
    ("Glm4vMoe", "attention_bias"): False,
    ("Glm4vMoe", "norm_topk_prob"): False,
    ("Glm4vMoe", "partial_rotary_factor"): 1.0,
}


_SHARED = {"layer_types": FULL[:2], "num_kv_shared_layers": 1}
_ROPE = {"rope_type": "default", "rope_theta": 3e5}
BESIDE_OF = {
    **{
        (name, field): beside
        for name in ("Gemma4", "Gemma4Unified")
        for field, beside in (
            ("num_global_key_value_heads", {"attention_k_eq_v": True}),
            ("num_kv_shared_layers", {"layer_types": FULL[:2]}),
            ("use_double_wide_mlp", _SHARED),
        )
    },
    **{
        ("Gemma4", field): {"enable_moe_block": True}
        for field in ("moe_intermediate_size", "num_experts", "top_k_experts")
    },
}
OTHER_OF |= {
    (name, field): value
    for name in ("Gemma4", "Gemma4Unified")
    for field, value in (
        ("layer_types", FULL[:2]),
        ("per_layer_config", {"1": {"head_dim": 24}}),
        ("rope_parameters", {"full_attention": _ROPE, "sliding_attention": _ROPE}),
    )
}

ARCHITECTURES = {family.architecture: family for family in MULTIMODAL}


def read(values) -> Any:
    return models.config_from_dict(values)


def theirs(values, folder):
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


def text_table(name):
    return ARCHITECTURES[f"{name}ForConditionalGeneration"].texts[0].fields


def test_there_is_a_config_of_every_architecture():
    assert {f"{name}ForConditionalGeneration" for name in NAMES} == FAMILIES.keys() - TEXT_FAMILIES


@pytest.mark.parametrize("family", MULTIMODAL, ids=lambda family: family.architecture)
def test_every_field_of_transformers_has_its_place(family):
    outer = transformers_fields.declared(family.model_type) - {"rope_parameters"}
    assert outer - family.fields.names == set()
    for text in family.texts:
        if text.architecture in NEW_TEXTS:
            (model_type,) = text.fields.model_types
            known = transformers_fields.declared(model_type)
            known |= transformers_fields.looked_at_in(family.model_type, "Text")
            assert known - text.fields.names - {"vision_config", "text_config"} == set()


@pytest.mark.sample(40)
@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field)
        for name in NAMES
        for field in sorted(text_table(name).reads - NOT_OF_A_FAMILY - OUTER)
        if (name, field) != ("Gemma3", "final_logit_softcapping")
    ],
)
def test_fields_of_the_text_config_are_read(name, field, tmp_path):
    beside = BESIDE_OF.get((name, field), BESIDE.get(field, {}))
    other = OTHER_OF.get((name, field), OTHER[field])
    if field in ("rope_parameters", "rope_scaling") and name == "Gemma3":
        beside = {"layer_types": FULL[:2]}
        other = {"full_attention": {"rope_type": "linear", "factor": 3.0}}
        other = other if field == "rope_parameters" else other["full_attention"]
    if field in ("layer_types", "rope_local_base_freq", "sliding_window_pattern"):
        beside = beside | {"sliding_window": 9}
    base = config_of(name, beside)
    assert read(config_of(name, beside | {field: other})) != read(base)
    # A missing field is the default of transformers.
    absent = config_of(name, beside)
    absent["text_config"].pop(field, None)
    text = theirs(absent, tmp_path).text_config
    text.allow_global_per_layer_attribute_access = True
    required = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"}
    required |= {"vocab_size", "max_position_embeddings"}
    if beside.get("enable_moe_block") or (field in required and name not in HAS_SIZES):
        with pytest.raises(models.CheckpointError, match=f"config.json: text_config .*{field}"):
            read(absent)
    elif hasattr(text, field) and field != "per_layer_config":
        default = getattr(text, field)
        whole = config_of(name, beside | {field: default})
        assert read(absent) == read(whole), default


@pytest.mark.parametrize("name", NAMES)
def test_the_rotary_embedding_is_that_of_transformers(name, tmp_path):
    for rope in (
        {"rope_theta": 7e5},
        {"rope_theta": None},
        {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}},
        {"rope_scaling": {**YARN, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_theta": 7e5, "partial_rotary_factor": 0.5},
    ):
        if name in HAS_SIZES or ("partial_rotary_factor" in rope and "Glm" not in name):
            continue
        values = config_of(name, rope)
        values["text_config"] = {k: v for k, v in values["text_config"].items() if v is not None}
        config = theirs(values, tmp_path).text_config
        config.standardize_rope_params()
        wanted, found = config.rope_parameters, read(values).rope
        assert (found.kind, found.theta) == (wanted["rope_type"], wanted["rope_theta"]), rope
        part = wanted.get("partial_rotary_factor", 1.0)
        assert found.rotary_dim == int(read(values).head_dim * part), rope


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Qwen2")])
def test_an_old_file_has_the_text_config_outside(name, tmp_path):
    values = config_of(name, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})
    text = values.pop("text_config")
    del text["model_type"], values["tie_word_embeddings"]
    flat = values | text | {"torch_dtype": "bfloat16"}
    config = theirs(flat, tmp_path)
    found = read(flat)
    assert found.hidden_size == config.text_config.hidden_size == 64
    assert found.rope.kind == config.text_config.rope_parameters["rope_type"] == "default"
    assert found.dtype == "bfloat16"
    assert not found.tie_embeddings
    assert read(flat | {"tie_word_embeddings": True}).tie_embeddings
    assert unknown_fields(flat | {"no_such_field": 1}) == ["no_such_field"]
    with pytest.raises(models.CheckpointError, match=r"config\.json: is_causal"):
        read(flat | {"is_causal": False})


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("text", [True, False, None])
def test_tied_embeddings(name, outer, text, tmp_path):
    """Without the names of the tensors; with them, see test_multimodal_loading.py."""
    values = config_of(name, {} if text is None else {"tie_word_embeddings": text})
    values["tie_word_embeddings"] = outer
    if outer is None:
        del values["tie_word_embeddings"]
    decoder = read(values).text_model.decoder
    names = {f"{decoder}embed_tokens.weight"}
    ours = models.config_from_dict(values, names)
    assert ours.tie_embeddings == bool(theirs(values, tmp_path).tie_word_embeddings)
    by_default = outer if outer is not None else name in TIED_BY_DEFAULT
    assert ours.tie_embeddings == (by_default or (name in TEXT_TIES and bool(text)))


@pytest.mark.parametrize("name", NAMES)
def test_a_head_in_the_checkpoint_is_not_tied_unless_config_json_says_so(name):
    values = config_of(name, {"tie_word_embeddings": False})
    for decoder, head in (
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.", "lm_head"),
    ):
        layouts = ARCHITECTURES[values["architectures"][0]].layouts
        if decoder not in {layout.decoder for layout in layouts}:
            continue
        names = {f"{decoder}embed_tokens.weight", f"{head}.weight"}
        for outer in (True, False):
            found = models.config_from_dict(values | {"tie_word_embeddings": outer}, names)
            assert found.tie_embeddings == outer
            assert found.text_model is not None
            assert (found.text_model.decoder, found.head_module) == (decoder, head)
        left_open = {k: v for k, v in values.items() if k != "tie_word_embeddings"}
        assert not models.config_from_dict(left_open, names).tie_embeddings


def test_without_weights_the_text_config_says_whether_there_is_a_head():
    """As of Ministral 3: transformers ties by default, and then finds another head."""
    for tied in (True, False):
        values = config_of("Mistral3", {"tie_word_embeddings": tied})
        del values["tie_word_embeddings"]
        assert read(values).tie_embeddings == tied


def test_the_logits_of_gemma_3_are_not_capped():
    """transformers reads the field for the model without towers alone, as a golden shows."""
    assert read(config_of("Gemma3", {"final_logit_softcapping": 7.0})) == read(config_of("Gemma3"))


def test_the_dtype_is_the_outer_one():
    text = {"dtype": "float16"}
    assert read(config_of("Qwen3VL", text, dtype="bfloat16")).dtype == "bfloat16"
    assert read(config_of("Qwen3VL", text, torch_dtype="bfloat16")).dtype == "bfloat16"
    assert read(config_of("Qwen3VL", text)).dtype == "float16"
    assert read(config_of("Qwen3VL")).dtype == "float32"


def test_published_configs_that_leave_sizes_out(tmp_path):
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "model_type": "gemma3_text",
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    found, wanted = read(values), theirs(values, tmp_path).text_config
    assert unknown_fields(values) == []
    assert found.vocab_size == wanted.vocab_size
    assert found.head_dim == wanted.head_dim
    assert found.longest_sequence == wanted.max_position_embeddings
    assert found.sliding_windows[4:7] == (1024, None, 1024)
    assert found.tie_embeddings


@pytest.mark.parametrize(
    ("name", "heads", "sizes"),
    [
        (
            "Gemma4",
            (16, 8, 2),
            {
                "hidden_size": 2816,
                "intermediate_size": 2112,
                "num_hidden_layers": 30,
                "enable_moe_block": True,
                "num_experts": 128,
                "top_k_experts": 8,
                "moe_intermediate_size": 704,
            },
        ),
        ("Gemma4", (32, 16, 4), {"hidden_size": 5376, "num_hidden_layers": 60}),
        ("Gemma4Unified", (16, 8, 1), {"hidden_size": 3840, "num_hidden_layers": 48}),
    ],
)
def test_published_configs_of_gemma_4(name, heads, sizes, tmp_path):
    N, K, of_full = heads
    text = {
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "num_global_key_value_heads": of_full,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262_144,
        "use_bidirectional_attention": "vision",
    }
    if name == "Gemma4":
        text["hidden_size_per_layer_input"] = 0
    values = config_of(name, text | sizes)
    for field in ("rope_theta", "vocab_size_per_layer_input"):
        values["text_config"].pop(field, None)
    found, wanted = read(values), theirs(values, tmp_path).text_config
    assert unknown_fields(values) == []
    layers = wanted.per_layer_config
    for i, kind in enumerate(wanted.layer_types):
        full = kind == "full_attention"
        assert found.layer_heads[i] == (layers[i].num_key_value_heads, layers[i].head_dim)
        assert found.sliding_windows[i] == (None if full else 1024)
        assert found.of_layer(i).kv_projections == (1 if full else 2)
        assert found.rope_of(i).rotated_pairs == (64 if full else 0)
    assert found.per_layer_inputs is None
    assert (found.experts is None) == ("num_experts" not in sizes)


def test_fields_that_nothing_knows_have_their_path():
    values = config_of("Qwen3VL", {"no_such": 1, "rope_scaling": {"type": "default", "odd": 1}})
    assert unknown_fields(values | {"of_outer": 2}) == [
        "of_outer",
        "text_config.no_such",
        "text_config.rope_scaling.odd",
    ]


def test_errors_name_the_text_config():
    with pytest.raises(models.CheckpointError, match=r"config\.json: text_config: hidden_act is"):
        read(config_of("Qwen3VL", {"hidden_act": "tanh"}))
    with pytest.raises(models.CheckpointError, match=r"text_config: model_type is 'llama'.*must"):
        read(config_of("Qwen3VL", {"model_type": "llama"}))
    with pytest.raises(models.CheckpointError, match=r"config\.json: text_config is"):
        read(config_of("Qwen3VL") | {"text_config": [1]})
    with pytest.raises(models.CheckpointError, match=r"head_dim is 32; it must be hidden_size"):
        read(config_of("Glm4v", {"head_dim": 32}))


def test_the_text_family_is_chosen_by_its_model_type():
    assert read(config_of("Mistral3")).text_model.architecture == "MistralForCausalLM"
    ministral = {"model_type": "ministral3", "rope_theta": None}
    found = read(config_of("Mistral3", ministral))
    assert found.text_model.architecture == "Ministral3ForCausalLM"
    assert found.rope.query_scale_beta == 0.1
