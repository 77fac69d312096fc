"""Loading text models from checkpoints that have towers beside them, plain and quantised."""

import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from forward import logits_of
from multimodal_cases import config_of
from plain_checkpoints import PROMPTS, write_plain
from quantised_files import FORMATS, write_quantised
from safetensors.numpy import load_file, save_file
from test_quantised_loading import linears, load

from rjax import models
from rjax.models.config import TextModel
from rjax.models.families import FAMILIES
from rjax.models.families.multimodal import own_names
from rjax.models.loading import load as load_module
from rjax.models.loading.tensors import TensorEntry, read_tensors
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.schemes import UNQUANTISED

GOLDENS = Path(__file__).parent.parent / "golden" / "multimodal"
CASES = sorted(json.loads((GOLDENS / "cases.json").read_text()))
NESTED, INSIDE, BESIDE = "model.language_model.", "language_model.model.", "model."
# (start of names in transformers' modules, the same in older files) by decoder.
LAYOUTS = {
    NESTED: {},
    INSIDE: {NESTED: INSIDE, "lm_head.": "language_model.lm_head.", "model.vision": "vision"},
    BESIDE: {NESTED: BESIDE, "model.visual.": "visual."},
}
TOWERS = {"Mistral3": "model.vision_tower.layers.0.attn.qkv", "Gemma3": "model.vision_tower.conv"}


def tensors_of(folder):
    return {name: entry.read() for name, entry in read_tensors(folder).items()}


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def renamed(tensors, starts):
    def of(name):
        old = next((start for start in starts if name.startswith(start)), "")
        return starts.get(old, "") + name.removeprefix(old)

    return {of(name): value for name, value in tensors.items()}


def copied(name, tmp_path):
    return Path(shutil.copytree(GOLDENS / "models" / name, tmp_path / name))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_towers_are_neither_read_nor_counted(name, monkeypatch):
    folder = GOLDENS / "models" / name
    read, totals = set(), []
    plain, bar = TensorEntry.read_into, load_module.tqdm
    monkeypatch.setattr(
        TensorEntry, "read_into", lambda self, *a, **k: (read.add(self), plain(self, *a, **k))[1]
    )
    monkeypatch.setattr(load_module, "tqdm", lambda **k: (totals.append(k["total"]), bar(**k))[1])
    loaded = load(folder)
    family = FAMILIES[loaded.config.architecture]
    text = {
        entry
        for entry in read_tensors(folder).values()
        if not entry.name.startswith(family.unused(loaded.config))
    }
    assert read == text < set(read_tensors(folder).values())
    assert totals == [sum(entry.size for entry in text)]
    numbers = sum(int(np.prod(entry.shape)) for entry in text)
    assert loaded.model.weight_bytes == 4 * numbers  # float32


def test_tensors_that_are_neither_text_nor_tower_are_refused(tmp_path):
    folder = copied("qwen3vl_g1_h24_bias", tmp_path)
    tensors = tensors_of(folder)
    for name in ("model.language_model.layers.0.mlp.odd.weight", "audio_tower.x", "visuals.x"):
        rewrite(folder, tensors | {name: np.zeros(2, np.float32)})
        with pytest.raises(models.CheckpointError, match=f"{name}, which Qwen3VL.* does not use"):
            load(folder)
    missing = dict(tensors)
    del missing["model.language_model.norm.weight"]
    rewrite(folder, missing)
    with pytest.raises(models.CheckpointError, match=r"lacks the tensor model\.language_model\.n"):
        load(folder)
    rewrite(folder, {name: t for name, t in tensors.items() if "visual" not in name})
    load(folder)  # somebody removed the towers


def test_the_identity_of_the_weights_is_that_of_the_text(tmp_path):
    folder = copied("qwen3vl_g1_h24_bias", tmp_path)
    config = models.config_from_folder(folder)
    unused = FAMILIES[config.architecture].unused(config)
    before = models.weights_digest(folder, unused)
    for part, same in (("visual.", True), ("embed_tokens", False)):
        tensors = tensors_of(folder)
        name = next(name for name in tensors if part in name)
        rewrite(folder, tensors | {name: tensors[name] + 1})
        assert (models.weights_digest(folder, unused) == before) == same


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("gemma3vl_g1_h24_untied", INSIDE),
        ("mistral3_g3_h24_query_scale", INSIDE),
        ("qwen2vl_g2_h24_sliding", BESIDE),
        ("qwen25vl_g2_h24_yarn", BESIDE),
    ],
)
def test_every_layout_has_the_same_logits(name, decoder, tmp_path):
    """Those that no golden has; transformers reads them so."""
    folder = copied(name, tmp_path)
    rewrite(folder, renamed(tensors_of(folder), LAYOUTS[decoder]))
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    loaded = load(folder)
    assert loaded.config.text_model is not None
    assert loaded.config.text_model.decoder == decoder
    found = logits_of(loaded.model, expected["tokens"], expected["positions"])
    np.testing.assert_allclose(found, expected["logits"], atol=2e-4 * abs(found).max())


def test_a_checkpoint_without_head(tmp_path):
    """The decoder and the towers of Gemma 3 alone, as transformers' Gemma3Model writes them."""
    name = "gemma3vl_g3_h32_windows"
    folder = copied(name, tmp_path)
    names = {"language_model.model.": "language_model."}
    rewrite(folder, renamed(tensors_of(folder), names))
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    found = logits_of(load(folder).model, expected["tokens"], expected["positions"])
    np.testing.assert_allclose(found, expected["logits"], atol=2e-4 * abs(found).max())


def test_tied_in_config_json_but_not_in_the_checkpoint(tmp_path):
    folder = copied("mistral3_g3_h24_open_tie", tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    with pytest.raises(
        models.CheckpointError, match=r"language_model\.lm_head\.weight that differs"
    ):
        load(folder)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        (name, ("fp8", "int8")[i % 2])
        for i, name in enumerate(sorted(CASES))
        if i % 4 < 3 and not name.startswith("qwen3_5")  # test_gated_delta_net.py has these
    ],
)
def test_quantising_on_load(name, quantization):
    folder = GOLDENS / "models" / name
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    loaded = load(folder, quantization=quantization)
    schemes = {path: linear.scheme.name for path, linear in linears(loaded.model).items()}
    assert {name for path, name in schemes.items() if "per_layer" not in path} == {quantization}
    found = logits_of(loaded.model, expected["tokens"], expected["positions"])
    error = np.linalg.norm(found - expected["logits"]) / np.linalg.norm(expected["logits"])
    assert 1e-4 < error < (0.25 if quantization == "fp8" else 0.15)


def with_rules(quantization, names):
    """The quantization_config with the list of modules that are not quantised."""
    rules = {"compressed-tensors": "ignore", "gptq": "dynamic"}
    rule = rules.get(quantization["quant_method"], "modules_to_not_convert")
    if rule == "dynamic":
        return quantization | {rule: {f"-:{re.escape(name)}": {} for name in names}}
    return quantization | {rule: names}


QUANTISED = [
    ("Qwen3VL", NESTED, "awq"),
    ("Qwen3VL", NESTED, "fp8-block"),
    ("Qwen2_5_VL", BESIDE, "awq"),
    ("Qwen2_5_VL", BESIDE, "gptq-v2-8bit"),
    ("Qwen2_5_VL", BESIDE, "w4a16-asym"),
    ("Qwen2VL", NESTED, "deepseek-fp8"),
    ("Mistral3", INSIDE, "fp8-of-transformers"),
    ("Mistral3", INSIDE, "w4a16-asym"),
    ("Gemma3", INSIDE, "fp8-dynamic"),
    ("Gemma3", NESTED, "w8a8"),
    ("Glm4v", NESTED, "fp8-static"),
]


def rules_of(form):
    """Who may have written the names of modules that are not quantised."""
    expressions = FORMATS[form][0]["quant_method"] == "compressed-tensors"
    return ["transformers", "checkpoint", *(["expressions"] if expressions else [])]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "decoder", "form", "rules"),
    [(*case, rules) for case in QUANTISED for rules in rules_of(case[2])],
)
def test_quantised_checkpoints(name, decoder, form, rules, tmp_path):
    """One layer is left unquantised by its name, in the words of transformers, of the checkpoint,
    or of a regular expression; the tower and the head by theirs."""
    values = config_of(name, {"hidden_size": 128, "num_attention_heads": 8}, dtype="float32")
    folders = write_quantised(tmp_path, values, form)
    tower = TOWERS.get(name, "model.visual.blocks.0.attn.qkv")
    kept = f"{NESTED}layers.1.mlp"
    plain = tensors_of(folders[1])
    starts = LAYOUTS[decoder]
    (own,) = renamed({kept: None}, starts)
    entries = {
        "transformers": [kept, tower, "lm_head"],
        "checkpoint": [own, *renamed({tower: None}, starts), "lm_head"],
        "expressions": [
            f"re:{re.escape(kept)}.*",
            f"re:.*{tower.split('.')[1]}.*",
            "re:.*lm_head",
        ],
    }[rules]
    for folder in folders:
        tensors = tensors_of(folder)
        of_kept = [one for one in tensors if one.startswith(kept)]
        tensors = {one: value for one, value in tensors.items() if one not in of_kept}
        tensors |= {one: value for one, value in plain.items() if one.startswith(kept)}
        tensors |= {f"{tower}.weight": np.ones((2, 2), np.float32)}
        rewrite(folder, renamed(tensors, starts))
    config = json.loads((folders[0] / "config.json").read_text())
    config["quantization_config"] = with_rules(config["quantization_config"], entries)
    (folders[0] / "config.json").write_text(json.dumps(config))
    found, expected = load(folders[0]), load(folders[1])
    assert found.config.text_model is not None
    assert found.config.text_model.decoder == decoder
    theirs = linears(expected.model)
    for path, linear in linears(found.model).items():
        assert (linear.scheme == UNQUANTISED) == (path[:3] == ("layers", 1, "mlp")), path
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), theirs[path].weight_matrix(jnp.float32), str(path)
        )


@pytest.mark.parametrize(("name", "form"), [("Qwen3VLMoe", "fp8-block"), ("Glm4vMoe", "awq")])
def test_quantised_experts(name, form, tmp_path):
    """Each in tensors of its own, as quantised checkpoints have them."""
    values = config_of(name, {"hidden_size": 128}, dtype="float32")
    folders = write_quantised(tmp_path, values, form)
    config = json.loads((folders[0] / "config.json").read_text())
    kept = ["lm_head", *(f"model.language_model.layers.{i}.mlp.gate" for i in range(2))]
    config["quantization_config"] = with_rules(config["quantization_config"], kept)
    (folders[0] / "config.json").write_text(json.dumps(config))
    found, expected = linears(load(folders[0]).model), linears(load(folders[1]).model)
    assert all(linear.scheme != UNQUANTISED for linear in found.values())
    for path, linear in found.items():
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), expected[path].weight_matrix(jnp.float32), str(path)
        )


def test_the_quantization_config_of_the_text_model(tmp_path):
    """Where the outer config has none."""
    quantised, plain = write_quantised(tmp_path, config_of("Qwen3VL", dtype="float32"), "awq")
    config = json.loads((quantised / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(config))
    found, expected = linears(load(quantised).model), linears(load(plain).model)
    for path, linear in found.items():
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), expected[path].weight_matrix(jnp.float32), str(path)
        )


@pytest.mark.parametrize(
    ("entry", "nested", "inside", "beside"),
    [
        ("lm_head", "lm_head", "lm_head", "lm_head"),
        ("language_model.lm_head", "lm_head", "language_model.lm_head", "lm_head"),
        *(
            (f"{start}layers.3.mlp", f"{NESTED}layers.3.mlp", f"{INSIDE}layers.3.mlp",
             f"{BESIDE}layers.3.mlp")
            for start in (NESTED, INSIDE, BESIDE)
        ),
        (r"re:^model\.language_model\.layers\.\d+", r"re:^model\.language_model\.layers\.\d+",
         r"re:^language_model\.model\.layers\.\d+", r"re:^model\.layers\.\d+"),
        ("re:model.layers.*", f"re:{NESTED}layers.*", f"re:{INSIDE}layers.*", "re:model.layers.*"),
        ("model.visual.blocks.0", *["model.visual.blocks.0"] * 3),
        ("re:.*vision_tower.*", *["re:.*vision_tower.*"] * 3),
        ("Linear", *["Linear"] * 3),
    ],
)  # fmt: skip
def test_names_of_modules_in_a_quantization_config(entry, nested, inside, beside):
    for decoder, head, wanted in (
        (NESTED, "lm_head", nested),
        (INSIDE, "language_model.lm_head", inside),
        (BESIDE, "lm_head", beside),
    ):
        text = TextModel("LlamaForCausalLM", "images", decoder, head)
        assert own_names({"ignore": [entry], entry: {"a": 1}}, text) == {
            "ignore": [wanted],
            wanted: {"a": 1},
        }


def random_old_checkpoint(folder):
    """A Qwen2.5-VL of random weights with the names of old files."""
    source = write_plain(folder / "random", config_of("Qwen2_5_VL", dtype="float32"))
    tower = {"model.visual.blocks.0.attn.qkv.weight": np.ones((2, 3), np.float32)}
    rewrite(source, renamed(tensors_of(source) | tower, LAYOUTS[BESIDE]))
    return source


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        ("gemma3vl_g3_h32_windows", "fp8"),
        ("glm4vmoe_j8_k3_groups", "int8"),
        ("gemma4vl_g3_h20_old_fields", "int8"),
        ("", "int4"),
        ("", "awq"),
    ],
)
def test_quantising_a_checkpoint_keeps_its_names_and_towers(case, scheme, tmp_path):
    source = GOLDENS / "models" / case if case else random_old_checkpoint(tmp_path)
    settings = choose_settings(models.config_from_folder(source), scheme)
    out = tmp_path / "out"
    found = quantise_checkpoint(source, out, settings, prompts=PROMPTS, progress=False)
    before, after = read_tensors(source), read_tensors(out)
    towers = [name for name in before if "vision_tower" in name or "visual" in name]
    assert towers
    for name in towers:
        np.testing.assert_array_equal(before[name].read(), after[name].read())
    assert found.bytes_before == sum(entry.size for entry in before.values())
    assert found.bytes_after == sum(entry.size for entry in after.values())
    loaded, plain = load(out), load(source)
    assert loaded.config.text_model == plain.config.text_model
    tokens = jnp.arange(30)
    wanted = logits_of(plain.model, tokens, tokens)
    error = np.linalg.norm(logits_of(loaded.model, tokens, tokens) - wanted)
    assert 1e-4 < error / np.linalg.norm(wanted) < (0.25 if case else 0.6)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    for name in towers:
        module = name.removesuffix(".weight")
        assert any(re.match(one[3:], module) for one in ignored if one.startswith("re:")), name


@pytest.mark.parametrize(
    "case", ["qwen3vlmoe_j5_k2_transposed", "gemma4vl_j5_k2_inputs", "qwen3_5vlmoe_r2_g3_fused"]
)
def test_experts_in_one_tensor_are_written_each(case, tmp_path):
    """As llm-compressor writes them, from tensors with the outputs or the inputs first."""
    source = GOLDENS / "models" / case
    settings = choose_settings(models.config_from_folder(source), "int8")
    written = quantise_checkpoint(source, tmp_path / "out", settings, progress=False)
    assert any(".experts.0.gate_proj" in one.module for one in written.modules)
    found, expected = linears(load(tmp_path / "out").model), linears(load(source).model)
    for path, linear in found.items():
        weight, wanted = (
            np.asarray(each.weight_matrix(jnp.float32)) for each in (linear, expected[path])
        )
        axis = 1 if linear.num_experts else 0
        limit = np.abs(wanted).max(axis, keepdims=True) / 127
        assert (np.abs(weight - wanted) <= 0.51 * limit).all(), path
