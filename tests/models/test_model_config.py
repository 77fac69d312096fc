"""Reading config.json: old and new spellings agree, and what cannot be used is refused clearly."""

import json
import math

import pytest
from field_cases import FULL, LLAMA, MIXED, OPT, YARN, of
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax import models
from rjax.models.families import FAMILIES
from rjax.models.families.rope_fields import ROPE_KINDS
from rjax.models.loading.config import unknown_fields
from rjax.models.rope import RopeConfig, inverse_frequencies
from tests.properties import num_examples


def read(values):
    return models.config_from_dict(values)


SHORT = {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 8}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            {"rope_theta": 500000, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        ),
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"head_dim": 16}, {"head_dim": None}),
    ],
)
def test_old_and_new_spellings_agree(new, old):
    assert read(LLAMA | new) == read(LLAMA | old)


def test_yarn_settings():
    yarn = YARN
    found = read(LLAMA | {"rope_scaling": yarn}).rope
    assert found == RopeConfig(
        "yarn",
        10000.0,
        16,
        factor=4.0,
        original_max_position=2048,
        attention_factor=0.1 * math.log(4) + 1,
    )
    deepseek = {**yarn, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    rope = read(LLAMA | {"rope_scaling": deepseek}).rope
    assert not rope.truncate
    assert rope.attention_factor == pytest.approx(
        (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    )
    explicit = read(LLAMA | {"rope_scaling": {**yarn, "attention_factor": 1.25}})
    assert explicit.rope.attention_factor == 1.25


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (LLAMA, (None,) * 3),
        (of("Mistral"), (4096,) * 3),
        (of("Mistral", sliding_window=None), (None,) * 3),
        (of("Mistral", sliding_window=64), (64,) * 3),
        (of("Qwen2", sliding_window=64), (None,) * 3),
        (
            of("Qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1),
            (None, 64, 64),
        ),
        (
            of(
                "Qwen3",
                sliding_window=8,
                use_sliding_window=True,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            (8, None, 8),
        ),
        (of("Mistral", sliding_window=64, layer_types=None), (64,) * 3),
        (of("Mistral", sliding_window=64, layer_types=MIXED), (64, None, 64)),
        (of("Mistral", layer_types=MIXED), (4096, None, 4096)),
        (of("Mistral", sliding_window=None, layer_types=FULL), (None,) * 3),
        (of("Ministral"), (4096,) * 3),
        (of("Ministral", sliding_window=64, layer_types=MIXED), (64, None, 64)),
        (of("Phi3"), (None,) * 3),
        (of("Phi3", sliding_window=64, layer_types=["sliding_attention"] * 3), (64,) * 3),
        (of("Phi3", sliding_window=2047), (2047,) * 3),
    ],
)
def test_sliding_windows(values, windows):
    assert read(values).sliding_windows == windows


def test_defaults_of_families():
    assert read(of("Qwen3")).head_dim == 128
    assert read(of("Qwen3")).qk_norm
    assert read(of("Qwen2")).qkv_bias
    assert not read(of("Qwen2")).output_bias
    assert read({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4
    assert read(OPT).tie_embeddings
    assert not read(LLAMA).tie_embeddings
    assert read(of("Phi3", partial_rotary_factor=0.5)).rope.rotary_dim == 8
    assert read(LLAMA).dtype == "float32"


def test_configs_are_hashable_and_frozen():
    config = read(LLAMA)
    assert hash(config) == hash(read(LLAMA))
    with pytest.raises(AttributeError):
        config.vocab_size = 1


def test_code_of_a_checkpoint_is_never_looked_at():
    assert read(LLAMA | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}) == read(LLAMA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures is .* a list of texts"),
        ({"architectures": [{}]}, "a list of texts"),
        (LLAMA | {"vocab_size": None}, "no field 'vocab_size'"),
        *[
            (LLAMA | {"hidden_size": bad}, "hidden_size is .* a whole number from 1")
            for bad in (0, -1, 2**31, 64.0, "64", True, [64], float("nan"))
        ],
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA | {"num_hidden_layers": 2**31 - 1}, "from 1 to 4096"),
        (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        (LLAMA | {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'.*true or false"),
        (LLAMA | {"hidden_act": "tanh"}, "hidden_act is 'tanh'.*silu"),
        (LLAMA | {"dtype": "int8"}, "dtype is 'int8'.*bfloat16"),
        (LLAMA | {"num_key_value_heads": 3}, "must be a multiple"),
        (LLAMA | {"hidden_size": 66}, "without a head_dim"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config.*unquantised"),
        (LLAMA | {"rope_theta": 1}, "rope_theta is 1.0; it must be above 1"),
        (LLAMA | {"rope_theta": 1e300}, "rope_theta"),
        (LLAMA | {"head_dim": 15}, "rotates 15 dims.*even"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "rotates every dim"),
        *[
            (LLAMA | {"rope_theta": bad}, "rope_theta is .*; it must be a number from 1e-18 to")
            for bad in (10**400, -(10**400), "1e4", True, [1e4], float("nan"), float("inf"))
        ],
        *[
            (LLAMA | {"rope_scaling": {**YARN, name: bad}}, f"rope_scaling: {name} is .*; it must")
            for name in ("factor", "beta_fast", "attention_factor", "truncate")
            for bad in (10**400, "1", float("nan"))
        ],
        (LLAMA | {"rope_scaling": {**YARN, "rope_type": ""}}, "has the type ''; supported"),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "a separate object for 'full_attention'; only one rotary embedding",
        ),
        (LLAMA | {"rope_scaling": {"type": "mrope"}}, "'mrope'; supported"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "no field 'short_factor'"),
        (LLAMA | {"rope_scaling": {"rope_type": ["x"]}}, "supported"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear'.*an object"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling has no field 'factor'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        (
            LLAMA | {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "high_freq_factor": 1.0}},
            "must be below",
        ),
        (of("Phi3", rope_scaling={"type": "linear"}), "'linear'; supported are default, longrope"),
        (of("Phi3", rope_scaling={"type": "su"}), "no field 'short_factor'"),
        (of("Phi3", rope_scaling=SHORT), "short_factor is .*8 numbers, one for each rotated pair"),
        (of("Qwen2", layer_types=["full_attention"]), "layer_types has 1 entries"),
        (of("Qwen2", layer_types=["chunked_attention"] * 3), "chunked_attention"),
        (of("Qwen2", layer_types=["sliding_attention"] * 3), "no window applies"),
        (of("Mistral", sliding_window=0), "sliding_window is 0"),
        (of("Mistral", layer_types=["sliding_attention"]), "layer_types has 1 entries"),
        (of("Ministral", layer_types=[]), "layer_types has 0 entries"),
        (
            of("Mistral", layer_types=MIXED, sliding_window=None),
            "no window applies; set sliding_window to its size",
        ),
        (of("Phi3", layer_types=MIXED), "layer_types is .*one kind of layers"),
        (of("Phi3", layer_types=FULL, sliding_window=64), "layer_types is .*one kind of layers"),
        (of("Mistral", model_type="llama"), "model_type is 'llama'; it must be mistral or mini"),
        (OPT | {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32; it must be equal to"),
        (OPT | {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ],
)
def test_what_cannot_be_used_is_refused(values, message):
    with pytest.raises(models.CheckpointError, match=message) as caught:
        read(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_broken_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(models.CheckpointError, match=message):
        models.config_from_folder(tmp_path)


def test_reads_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert models.config_from_folder(str(tmp_path)) == read(LLAMA)


_NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 64, 2**31, 10**400, 1e-18, 1e-9, 0.5, 1.0, 1e18, 1e300, math.inf, math.nan]
)
_ODD = _NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.none(), max_size=2)
_ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(sorted(ROPE_KINDS))},
    optional=dict.fromkeys(
        [
            "rope_theta",
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "short_factor",
            "long_factor",
        ],
        _NUMBERS | _ODD | st.lists(_NUMBERS, min_size=8, max_size=8),
    ),
)


_FIELDS = sorted(
    set().union(
        *(family.fields.reads | family.fields.constraints.keys() for family in FAMILIES.values())
    )
)


@settings(max_examples=num_examples(300))
@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    rope=_ROPE | _ODD,
    changes=st.dictionaries(st.sampled_from(_FIELDS), _ODD),
)
def test_any_config_is_read_or_refused(architecture, rope, changes):
    values = OPT | LLAMA | {"architectures": [architecture], "rope_parameters": rope} | changes
    try:
        config = read(values)
    except models.CheckpointError:
        return
    for one in config.ropes:
        if one.rotary_dim >= 1000:
            continue
        frequencies = inverse_frequencies(one)
        assert frequencies.shape == (one.rotary_dim // 2,)
        assert all(math.isfinite(value) and value >= 0 for value in frequencies)


def test_the_experts_of_a_row_may_be_listed_for_each_layer():
    base = LLAMA | {"architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4}
    layers = base["num_hidden_layers"]
    assert read(base | {"moe_topk": [2] * layers}) == read(base | {"moe_topk": 2})
    for wrong in ([2] * (layers - 1), [*([2] * (layers - 1)), 1], [5] * layers, []):
        with pytest.raises(models.CheckpointError, match=r"moe_topk is .* same for each layer"):
            read(base | {"moe_topk": wrong})


def test_a_factor_of_the_base_is_no_scaling_by_length():
    base = LLAMA | {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16}
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    found = read(base | {"rope_scaling": rope})
    assert found.rope.kind == "default"
    assert found.rope.theta == pytest.approx(10000.0 * 1000.0 ** (16 / 14))
    assert found.longest_sequence == base["max_position_embeddings"]
    assert unknown_fields(base | {"rope_scaling": rope}) == []
    assert read(base | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).rope.kind == "dynamic"
