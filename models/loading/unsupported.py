"""What a checkpoint is whose architecture is not supported, as its config.json shows it."""

from collections.abc import Iterator, Mapping
from typing import Any

from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.families.family import Family

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_MEDIA = ("vision", "audio", "image", "video", "speech")
_RECURRENT_TYPES = ("mamba", "rwkv", "ssm", "xlstm", "hyena", "retnet", "griffin")
# Parts of the names of fields, and of the entries of lists of layers.
_RECURRENT_FIELDS = ("mamba", "ssm_", "state_size", "linear_attn", "linear_num_", "lru_width")
_RECURRENT_FIELDS += ("conv_kernel", "conv_l_cache", "rwkv", "hybrid_")
_RECURRENT_LAYERS = ("mamba", "linear_attention", "conv", "recurrent", "rwkv", "gated_delta")
_ATTENTION_FIELDS = ("num_attention_heads", "n_head", "attn_layer_indices")


def unsupported(fields: ConfigFields) -> CheckpointError:
    """The error for a config.json with none of the supported architectures: what it is instead."""
    found = list(fields.texts("architectures") or ())
    values = fields.values()
    return CheckpointError(
        f"config.json: architectures is {found!s:.200}, which is not supported: "
        f"{_kind(found, values)}. `rjax models` lists those that are"
    )


def _kind(architectures: list[str], values: Mapping[str, Any]) -> str:
    if _is_multimodal(values):
        return f"it is a multimodal model{_text_model(values)}"
    if values.get("is_encoder_decoder") is True:
        return "it is an encoder-decoder model"
    if _is_recurrent(values):
        hybrid = any(values.get(name) for name in _ATTENTION_FIELDS)
        return (
            "it is a hybrid of attention and recurrent layers"
            if hybrid
            else "it is a state-space or recurrent model"
        )
    family = _family_of_type(values.get("model_type"))
    if family is None:
        return "it is of a family that is unknown here; CONTRIBUTING.md says how to add one"
    if architectures:
        return (
            f"its model_type is that of {family.architecture}, but it has another head; one "
            "with a head for language modelling runs"
        )
    return f"its model_type is that of {family.architecture}; set architectures to it"


def _is_multimodal(values: Mapping[str, Any]) -> bool:
    return any(isinstance(values.get(name), dict) for name in _TEXT_CONFIGS) or any(
        name.startswith(part) or f"_{part}" in name
        for name, value in values.items()
        if value and isinstance(value, dict | str)
        for part in _MEDIA
    )


def _text_model(values: Mapping[str, Any]) -> str:
    """The end of a sentence about a part of it that runs."""
    for text in _text_configs(values):
        named = text.get("architectures")
        names = named if isinstance(named, list) else []
        known = [FAMILIES[name] for name in names if isinstance(name, str) and name in FAMILIES]
        family = known[0] if known else _family_of_type(text.get("model_type"))
        if family is not None:
            return (
                f"; its text model is of {family.architecture}, which runs once it is saved as a "
                "checkpoint of its own"
            )
    return ""


def _text_configs(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in _TEXT_CONFIGS:
        inner = values.get(name)
        if isinstance(inner, dict):
            yield inner
            yield from _text_configs(inner)


def _is_recurrent(values: Mapping[str, Any]) -> bool:
    model_type = values.get("model_type")
    if isinstance(model_type, str) and any(part in model_type for part in _RECURRENT_TYPES):
        return True
    kinds = (
        kind
        for name, value in values.items()
        if isinstance(value, list) and ("layer" in name or "block" in name)
        for kind in value
        if isinstance(kind, str)
    )
    return any(part in kind for kind in kinds for part in _RECURRENT_LAYERS) or any(
        part in name.lower() for name in values for part in _RECURRENT_FIELDS
    )


def _family_of_type(model_type: Any) -> Family | None:
    """The family that transformers reads a ``model_type`` as."""
    if not isinstance(model_type, str):
        return None
    takes = [family for family in FAMILIES.values() if model_type in family.fields.model_types]
    own = f"{model_type.replace('_', '')}forcausallm"
    takes.sort(key=lambda family: family.architecture.lower() != own)  # two share their types
    return takes[0] if takes else None
