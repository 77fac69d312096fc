"""Page hashes depend on the weights, not on where they are stored."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rjax.models import load_model, save_model, weights_digest
from rjax.sampling import SamplingParams

from .tiny import make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

NAME = "model.safetensors"


def hashes(folder, **options):
    """Hashes of the pages of one prompt."""
    engine = make_engine(folder, load_format="auto", **options)
    run(engine, [("a", [*range(2, 20)], SamplingParams(temperature=0, max_tokens=2))])
    return sorted(engine._blocks._page_of)


def change(folder, name, place):
    """Overwrite one value in place."""
    tensors = load_file(folder / NAME)
    value = tensors[name].copy()
    value.flat[place] += 1
    save_file({**tensors, name: value}, folder / NAME)


@pytest.fixture
def stored(tiny, tmp_path):
    """A folder with weights."""
    loaded = load_model(tiny, dtype=jnp.float32, load_format="dummy", seed=5, progress=False)
    save_model(loaded.model, loaded.config, tmp_path / "one", dtype=jnp.float32)
    return tmp_path / "one"


@pytest.mark.slow
def test_equal_weights_in_two_folders_have_equal_hashes(stored, tmp_path):
    other = tmp_path / "cache of another machine"
    shutil.copytree(stored, other)
    first = hashes(stored)
    assert len(first) >= 2
    assert hashes(other) == first
    change(stored, "model.norm.weight", 3)
    assert not set(hashes(stored)) & set(first)


def test_dummy_weights_are_told_apart_by_their_seed(tiny):
    roots = [make_engine(tiny, seed=seed)._salted_root(None) for seed in (5, 5, 6)]
    assert roots[0] == roots[1] != roots[2]


def test_the_digest_is_of_the_tensors(tmp_path):
    draw = np.random.default_rng(0)
    tensors = {
        "small": draw.normal(size=7).astype(np.float32),
        "large": draw.normal(size=(300, 40)).astype(np.float32),
        "none": np.zeros((0, 4), np.float32),
    }

    def digest(name, parts):
        folder = tmp_path / name
        folder.mkdir()
        for file, part in parts.items():
            save_file(part, folder / file)
        files = {tensor: file for file, part in parts.items() for tensor in part}
        if len(parts) > 1:
            index = {"weight_map": files}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return weights_digest(folder)

    first = digest("one", {NAME: tensors})
    parts = [dict([item]) for item in tensors.items()]
    shards = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
    assert digest("shards", shards) == first  # the same tensors in several files
    others = {
        "a value": {"small": tensors["small"] + np.float32([0] * 6 + [1])},
        "the first value": {"large": tensors["large"] + np.eye(300, 40, dtype=np.float32)},
        "a name": {"Large": tensors["large"]},
        "a shape": {"large": tensors["large"].reshape(40, 300)},
        "a type": {"large": tensors["large"].view(np.int32)},
        "training": {"large": tensors["large"] * np.float32(1.001)},
    }
    found = {digest(name, {NAME: tensors | change}) for name, change in others.items()}
    assert len(found | {first}) == len(others) + 1
