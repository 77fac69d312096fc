"""Reading config.json."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.families.family import Family
from rjax.models.formats import read_format
from rjax.models.loading.linear_modules import with_format, with_quantization

_MAX_CONFIG_BYTES = 16 << 20


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Read a JSON object from a file of at most ``limit`` bytes, or raise CheckpointError."""
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path} is larger than {limit} bytes; it is not a {path.name}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def config_from_folder(folder: str | Path, quantization: str | None = None) -> ModelConfig:
    """The ModelConfig of a Hugging Face folder.

    Args:
        folder: with a config.json.
        quantization: as for `load_model`.

    Raises:
        CheckpointError: the file is missing or unusable, or the quantization does not fit it.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json; give a Hugging Face model folder (config.json, "
            "*.safetensors, tokenizer files) or a hub id such as Qwen/Qwen3-0.6B"
        )
    config = config_from_dict(read_json(path, _MAX_CONFIG_BYTES))
    return with_quantization(config, quantization)


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Convert a parsed config.json to a ModelConfig; raise CheckpointError if it is unusable.

    ``auto_map`` (code shipped with a checkpoint) is ignored.
    """
    fields = ConfigFields(values)
    family = _family_of(fields)
    config = family.read_config(family.fields.check(fields))
    quantization = values.get("quantization_config")
    if quantization is None:
        return config
    config = with_format(config, read_format(quantization))
    return dataclasses.replace(config, quant_method=quantization["quant_method"])


def _family_of(fields: ConfigFields) -> Family:
    found = fields.texts("architectures") or ()
    for name in found:
        if name in FAMILIES:
            return FAMILIES[name]
    nearest = difflib.get_close_matches("".join(found[:1]), FAMILIES, 1, 0)[0]
    raise CheckpointError(
        f"config.json: architectures is {list(found)!s:.200}, which is not supported; the "
        f"nearest that is: {nearest}. `rjax models` lists all; CONTRIBUTING.md says how to add a "
        "family"
    )
