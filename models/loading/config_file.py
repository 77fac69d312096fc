"""Reading config.json."""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.families.family import Family
from rjax.models.formats import read_format, unknown_quantization_fields
from rjax.models.loading.linear_modules import with_format, with_quantization
from rjax.models.loading.unsupported import unsupported

_log = logging.getLogger(__name__)
_MAX_CONFIG_BYTES = 16 << 20
_MAX_TOKENS = 2**31 - 1


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
        folder: the folder with config.json.
        quantization: the name of a quantization or None, see `load_model`.

    Raises:
        CheckpointError: the file is missing or unusable, or the quantization does not fit it.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no config.json; give a Hugging Face model folder (config.json, "
            "*.safetensors, tokenizer files) or a hub id such as Qwen/Qwen3-0.6B"
        )
    values = read_json(path, _MAX_CONFIG_BYTES)
    config = config_from_dict(values)
    _warn_of(str(path), tuple(unknown_fields(values)))
    return with_quantization(config, quantization)


@functools.lru_cache(maxsize=64)  # an engine reads the file more than once
def _warn_of(path: str, unknown: tuple[str, ...]) -> None:
    if unknown:
        _log.warning(
            "config.json has fields that rjax does not know; they are ignored: %s (%s)",
            ", ".join(unknown)[:2000],
            path,
        )


def unknown_fields(values: Mapping[str, Any]) -> list[str]:
    """Names of the fields of a usable config.json that nothing here knows.

    Those of ``quantization_config`` and of the objects of rotary embeddings have their path.
    """
    fields = ConfigFields(values)
    quantization = values.get("quantization_config")
    of_weights = [] if quantization is None else unknown_quantization_fields(quantization)
    return [*_family_of(fields).fields.unknown(fields), *of_weights]


def config_from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Convert a parsed config.json to a ModelConfig; raise CheckpointError if it is unusable.

    ``auto_map`` (code shipped with a checkpoint) is ignored.
    """
    fields = ConfigFields(values)
    family = _family_of(fields)
    config = family.read_config(family.fields.check(fields))
    family.fields.check_config(fields, config)
    if config.longest_sequence > _MAX_TOKENS:
        raise CheckpointError(
            f"config.json: rope scaling stretches the context to {config.longest_sequence} tokens; "
            f"it must be at most {_MAX_TOKENS}"
        )
    quantization = values.get("quantization_config")
    if quantization is None:
        return config
    config = with_format(config, read_format(quantization))
    return dataclasses.replace(config, quant_method=quantization["quant_method"])


def _family_of(fields: ConfigFields) -> Family:
    for name in fields.texts("architectures") or ():
        if name in FAMILIES:
            return FAMILIES[name]
    raise unsupported(fields)
