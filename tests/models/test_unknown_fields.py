"""Fields of a config.json that nothing knows are named, once; known ones are not."""

import json
import logging
from pathlib import Path

import pytest
from field_cases import ARCHITECTURES, BASES, LAYER_ROPES, LLAMA, of

from rjax import models
from rjax.models.loading.config import unknown_fields

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIGS = sorted(GOLDEN.rglob("config.json"))
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "actorders": None}}
FLOATS = {"format": "float-quantized", "quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({}, []),
        ({"use_flash_attn": True, "alibi": True}, ["alibi", "use_flash_attn"]),
        ({"sliding_windows": None}, ["sliding_windows"]),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            ["rope_scaling.alpha"],
        ),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2]}}, []),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "zero_points": False}},
            ["quantization_config.zero_points"],
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "damp_percent": 0.1}},
            [],
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "descact": True}},
            ["quantization_config.descact"],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "block_size": [128, 128]}},
            ["quantization_config.block_size"],
        ),
        (
            {"quantization_config": {**FLOATS, "config_groups": {"a": {**GROUP, "b": 1}}, "c": 1}},
            [
                "quantization_config.c",
                "quantization_config.config_groups.a.b",
                "quantization_config.config_groups.a.weights.actorders",
            ],
        ),
    ],
)
def test_their_names(changes, unknown):
    assert unknown_fields(LLAMA | changes) == unknown
    models.config_from_dict(LLAMA | changes)


def test_those_of_types_of_layers():
    ropes = {kind: rope | {"mscal": 1.0} for kind, rope in LAYER_ROPES.items()}
    assert unknown_fields(of("Gemma3", rope_parameters=ropes)) == [
        "rope_parameters.full_attention.mscal",
        "rope_parameters.sliding_attention.mscal",
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configs_of_the_families_have_none(architecture):
    assert unknown_fields(BASES[architecture]) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.parent.name)
def test_files_that_libraries_wrote_have_none(path):
    values = json.loads(path.read_text())
    assert unknown_fields(values) == [], path


def test_one_warning_for_a_checkpoint(tmp_path, caplog):
    fields = {"alibi": True, "quantization_config": {"quant_method": "fp8", "block_size": [1]}}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | fields))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            models.config_from_folder(tmp_path)
    [record] = caplog.records
    assert record.getMessage() == (
        "config.json has fields that rjax does not know; they are ignored: alibi, "
        f"quantization_config.block_size ({tmp_path / 'config.json'})"
    )


def test_no_warning_without_any(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    models.config_from_folder(tmp_path)
    assert not caplog.records
