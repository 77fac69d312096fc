"""Loading from a folder: harmless deviations are accepted, others refused with a message."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rjax import models

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write(folder, shard_bytes=10**7, **changes):
    config = models.config_from_dict(TINY | changes)
    models.save_model(
        models.init_model(config), config, folder, dtype="float32", shard_bytes=shard_bytes
    )
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


def load(folder, **options):
    return models.load_model(folder, **{"dtype": None, "progress": False} | options)


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


def change(folder, edit):
    """Rewrite the single weights file after ``edit`` has changed its dict of tensors."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def refused(folder, message):
    with pytest.raises(models.CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_values_arrive_where_they_belong(folder):
    loaded = load(folder)
    tensors = load_file(folder / WEIGHTS)
    qkv = np.asarray(loaded.model.layers[1].attention.qkv.weight[...])  # [D, K, G+2, H]
    q = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(2, 2, 4, 16)
    np.testing.assert_array_equal(qkv[:, 1, 0], q[1, 0].T)
    np.testing.assert_array_equal(qkv[:, 0, 1], q[0, 1].T)
    v = tensors["model.layers.1.self_attn.v_proj.weight"].reshape(2, 4, 16)
    np.testing.assert_array_equal(qkv[:, 1, 3], v[1].T)
    up = np.asarray(loaded.model.layers[0].mlp.up.weight[...])
    np.testing.assert_array_equal(up[:, 1], tensors["model.layers.0.mlp.up_proj.weight"].T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", jnp.float16])
def test_dtype_is_as_asked(folder, dtype):
    assert {leaf.dtype for leaf in leaves(load(folder, dtype=dtype).model)} == {jnp.dtype(dtype)}


def test_values_do_not_depend_on_the_file_afterwards(folder):
    loaded = load(folder)
    before = [np.array(leaf) for leaf in leaves(loaded.model)]
    (folder / WEIGHTS).write_bytes(b"\xff" * (folder / WEIGHTS).stat().st_size)
    for a, b in zip(before, leaves(loaded.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dummy_weights_need_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    loaded = load(tmp_path, load_format="dummy", seed=1, dtype="bfloat16")
    again = load(tmp_path, load_format="dummy", seed=1, dtype="bfloat16")
    other = load(tmp_path, load_format="dummy", seed=2, dtype="bfloat16")
    for a, b in zip(leaves(loaded.model), leaves(again.model), strict=True):
        np.testing.assert_array_equal(a, b)
    embedding = np.asarray(loaded.model.embedding.weight[...], np.float32)
    assert np.any(embedding != np.asarray(other.model.embedding.weight[...], np.float32))
    assert embedding.std() == pytest.approx(0.02, rel=0.1)
    np.testing.assert_array_equal(loaded.model.norm.weight[...], 1)
    with pytest.raises(models.CheckpointError, match=r"no \*.safetensors"):
        load(tmp_path)


def test_options_are_checked(folder):
    with pytest.raises(ValueError, match="load_format is 'pt'"):
        load(folder, load_format="pt")
    with pytest.raises(ValueError, match="dtype is int8"):
        load(folder, dtype="int8")
    with pytest.raises(ValueError, match="'tensor'"):
        load(folder, mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
    with pytest.raises(ValueError, match=r"AxisType\.Auto"):
        load(folder, mesh=jax.make_mesh((1,), ("tensor",)))


def test_progress_bar_counts_bytes(folder, capfd):
    load(folder, progress=True)
    err = capfd.readouterr().err
    assert "Loading weights: 100%" in err
    assert "B/s" in err


# What is harmless.


def test_old_rotary_tables_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda t: t.update({name: np.zeros(2, np.float32)}))
    load(folder)


def test_tied_head_may_be_there_if_equal(tmp_path):
    folder = write(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    change(folder, lambda t: t.update({"lm_head.weight": embedding}))
    load(folder)
    change(folder, lambda t: t.update({"lm_head.weight": embedding + 1}))
    refused(folder, "differs from its embedding.*set tie_word_embeddings to false")


def test_names_without_the_model_prefix(folder):
    before = leaves(load(folder).model)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change(folder, strip)
    for a, b in zip(before, leaves(load(folder).model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hub_cache_links_are_followed(tmp_path, folder):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(folder.iterdir()):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    load(snapshot)


def test_other_weight_formats_beside_are_not_opened(folder):
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    (folder / "consolidated.safetensors").write_bytes(b"broken")
    load(folder)


# What is refused: tensors.


def test_missing_tensor(folder):
    change(folder, lambda t: t.pop("model.norm.weight"))
    refused(folder, "lacks the tensor model.norm.weight; the folder is incomplete")


def test_missing_head(folder):
    change(folder, lambda t: t.pop("lm_head.weight"))
    refused(folder, "lacks the tensor lm_head.weight; set tie_word_embeddings to true")


def test_many_missing_tensors_are_summed_up(folder):
    change(folder, lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name])
    refused(folder, "lacks tensors .* and 4 more")


def test_unknown_tensor(folder):
    name = "model.layers.0.self_attn.q_norm.weight"
    change(folder, lambda t: t.update({name: np.ones(4, np.float32)}))
    refused(folder, f"has the tensor {name}, which LlamaForCausalLM does not use")


def test_wrong_shape(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    change(folder, lambda t: t.update({name: np.zeros((24, 16), np.float32)}))
    refused(folder, rf"{name}.*shape \(24, 16\); config.json means \(16, 24\)")


def test_quantised_tensor(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    change(folder, lambda t: t.update({name: np.zeros((16, 24), np.int8)}))
    refused(folder, f"{name} has the type I8.*unquantised")


# What is refused: folders.


def test_pickles_only(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin, a pickle.*convert it to safetensors")


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, "no .*safetensors weights")


def test_several_files_without_index(folder):
    shutil.copy(folder / WEIGHTS, folder / "b.safetensors")
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    refused(folder, "2 safetensors files and no model.safetensors.index.json")


def test_link_out_of_the_folder(tmp_path, folder):
    (folder / WEIGHTS).rename(tmp_path / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, "is a link to .*elsewhere.safetensors, outside the model folder")


@pytest.fixture
def sharded(tmp_path):
    folder = write(tmp_path / "sharded", shard_bytes=3000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_load(sharded):
    load(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../model/model.safetensors",
        "/etc/passwd",
        "/etc/passwd.safetensors",
        "..",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "a\0.safetensors",
        "",
        "pytorch_model.bin",
        7,
        None,
    ],
)
def test_index_names_only_plain_files(sharded, folder, name):
    edit_index(sharded, lambda i: i["weight_map"].update({"model.norm.weight": name}))
    refused(sharded, "expected the plain name of a .safetensors file in the same folder")


def test_missing_shard(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    refused(sharded, f"lacks the shard {gone.name}")


def test_index_that_lies(sharded):
    other = sorted(path.name for path in sharded.glob("*.safetensors"))
    edit_index(sharded, lambda i: i["weight_map"].update({"model.norm.weight": other[0]}))
    refused(sharded, "places tensor 'model.norm.weight' in .*, which does not hold it")


def test_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    refused(sharded, "is in both")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
def test_broken_index(sharded, content):
    (sharded / INDEX).write_text(content)
    refused(sharded, "weight_map|JSON")


# What is refused: names of models.


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_folder_that_is_not_there(name):
    with pytest.raises(models.CheckpointError, match="does not exist; give a model folder"):
        models.resolve_folder(name)


def test_names_that_are_no_model(folder):
    with pytest.raises(models.CheckpointError, match="is a file"):
        models.resolve_folder(folder / "config.json")
    with pytest.raises(models.CheckpointError, match="has no revision 'main'"):
        models.resolve_folder(folder, "main")
    for name in ("", "x" * 5000, "~no-such-user/model", "x" * 300):
        with pytest.raises(models.CheckpointError):
            models.resolve_folder(name)
    with pytest.raises(models.CheckpointError, match="nor a valid hub id"):
        models.resolve_folder("no spaces/allowed")
    assert models.resolve_folder(str(folder)) == folder


def test_hub_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", os.fspath(tmp_path))
    with pytest.raises(models.CheckpointError, match=r"cannot be loaded: .*HF_ENDPOINT") as caught:
        models.resolve_folder("some-owner/some-model")
    assert "\n" not in str(caught.value)
