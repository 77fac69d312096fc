"""Which tokens end a text: those of generation_config.json, or else of config.json."""

import json
import pathlib
from typing import Any

import pytest
from transformers import GenerationConfig as TheirConfig

from rjax.api.llm import LLM
from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams
from rjax.tokenization.generation_config import GenerationConfig

from .conftest import TINY_OPTIONS

CASES: tuple[tuple[dict[str, Any] | None, dict[str, Any] | None, set[int]], ...] = (
    (None, {"eos_token_id": [1, 2]}, {1, 2}),
    (None, {"eos_token_id": 7}, {7}),
    ({}, {"eos_token_id": [1, 2]}, {1, 2}),
    ({"temperature": 0.5, "eos_token_id": None}, {"eos_token_id": [1, 2]}, {1, 2}),
    ({"eos_token_id": 3}, {"eos_token_id": [1, 2]}, {3}),
    ({"eos_token_id": [3, 4]}, {"eos_token_id": 1}, {3, 4}),
    (None, {"text_config": {"eos_token_id": [5, 6]}}, {5, 6}),
    (None, {"eos_token_id": None, "text_config": {"eos_token_id": 5}}, {5}),
    (None, {"eos_token_id": 1, "text_config": {"eos_token_id": 5}}, {1}),
    ({"eos_token_id": 3}, {"text_config": {"eos_token_id": 5}}, {3}),
    ({"eos_token_id": -1}, None, set()),
    (None, {"text_config": {}}, set()),
    (None, None, set()),
)


def _write(
    folder: pathlib.Path, generation: dict[str, Any] | None, model: dict[str, Any] | None
) -> None:
    for name, values in (("generation_config", generation), ("config", model)):
        if values is not None:
            (folder / f"{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(("generation", "model", "ends"), CASES)
def test_end_tokens_of_a_folder(
    generation: dict[str, Any] | None,
    model: dict[str, Any] | None,
    ends: set[int],
    tmp_path: pathlib.Path,
) -> None:
    _write(tmp_path, generation, model)
    assert GenerationConfig.from_folder(tmp_path).eos_token_ids == ends
    if generation is None and model is not None:
        theirs = TheirConfig.from_model_config(dict(model)).eos_token_id
        assert (set(theirs) if isinstance(theirs, list) else {theirs} - {None}) == ends


@pytest.mark.parametrize("model", [{"eos_token_id": "2"}, {"text_config": {"eos_token_id": [-3]}}])
def test_a_bad_one_names_its_file(model: dict[str, Any], tmp_path: pathlib.Path) -> None:
    _write(tmp_path, {}, model)
    with pytest.raises(InvalidConfigError, match=r"config\.json: eos_token_id is"):
        GenerationConfig.from_folder(tmp_path)


@pytest.mark.thorough
@pytest.mark.usefixtures("kept")
def test_each_of_several_ends_the_text(tiny_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"eos_token_id": [40, 41]}))
    with LLM(str(tmp_path), **TINY_OPTIONS) as llm:
        for end in (40, 41):
            params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[end])
            (output,) = llm.generate("a", params)
            assert output.outputs[0].token_ids == [end]
            assert output.outputs[0].finish_reason == "stop"
