"""Reading config.json, and what a quantization makes of the config."""

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES, TEXT_FAMILIES
from rjax.models.families.family import Family
from rjax.models.families.multimodal import Multimodal
from rjax.models.formats import (
    OnLoad,
    WeightFormat,
    format_names,
    read_format,
    unknown_quantization_fields,
)
from rjax.models.formats.weight_format import FLOATS
from rjax.models.loading.json_files import read_json
from rjax.models.loading.pieces import Piece, Weights, module_of
from rjax.models.loading.tensors import TensorEntry, tensor_names
from rjax.models.schemes import ON_LOAD, UNQUANTISED, WeightScheme

_log = logging.getLogger(__name__)
_MAX_CONFIG_BYTES = 16 << 20
_MAX_TOKENS = 2**31 - 1
_WEIGHT = ".weight"
_LINEAR_PARTS = (
    ".attention.qkv",
    ".attention.qkvz",
    ".attention.q_a",
    ".attention.q",
    ".attention.kv_a",
    ".attention.kv_b",
    ".attention.output",
    ".mlp.up",
    ".mlp.down",
    ".mlp.shared.up",
    ".mlp.shared.down",
)
_PLAIN_PARTS = (".attention.ba", "per_layer.projection", ".per_layer.gate", ".per_layer.output")
"""Projections that are held in the model's dtype, however a checkpoint stores them."""
_EXPERT_INPUTS = {"hidden size": "D", "width of an expert": "I"}  # axis letters
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_MEDIA = ("vision", "audio", "image", "video", "speech")
_RECURRENT_TYPES = ("mamba", "rwkv", "ssm", "xlstm", "hyena", "retnet", "griffin")
# Parts of the names of fields, and of the entries of lists of layers.
_RECURRENT_FIELDS = ("mamba", "ssm_", "state_size", "linear_attn", "linear_num_", "lru_width")
_RECURRENT_FIELDS += ("conv_kernel", "conv_l_cache", "rwkv", "hybrid_")
_RECURRENT_LAYERS = ("mamba", "linear_attention", "conv", "recurrent", "rwkv", "gated_delta")
_ATTENTION_FIELDS = ("num_attention_heads", "n_head", "attn_layer_indices")


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
    named = isinstance(_family_of(ConfigFields(values)), Multimodal)
    config = config_from_dict(values, tensor_names(Path(folder)) if named else None)
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
    family = _family_of(fields)
    quantization = family.quantization(fields, family.read(fields))
    of_weights = [] if quantization is None else unknown_quantization_fields(quantization)
    return [*family.unknown(fields), *of_weights]


def config_from_dict(
    values: Mapping[str, Any], names: Collection[str] | None = None
) -> ModelConfig:
    """Convert a parsed config.json to a ModelConfig; raise CheckpointError if it is unusable.

    ``auto_map`` (code shipped with a checkpoint) is ignored.

    Args:
        values: the fields of config.json.
        names: the names of the checkpoint's tensors, on which the config of a text model with
            towers beside it depends; None for those that transformers writes.
    """
    fields = ConfigFields(values)
    family = _family_of(fields)
    config = family.read(fields, names)
    if config.longest_sequence > _MAX_TOKENS:
        raise CheckpointError(
            f"config.json: rope scaling stretches the context to {config.longest_sequence} tokens; "
            f"it must be at most {_MAX_TOKENS}"
        )
    quantization = family.quantization(fields, config)
    if quantization is None:
        return config
    config = with_format(config, read_format(quantization))
    return dataclasses.replace(config, quant_method=quantization["quant_method"])


def _family_of(fields: ConfigFields) -> Family | Multimodal:
    for name in fields.texts("architectures") or ():
        if name in FAMILIES:
            return FAMILIES[name]
    raise unsupported(fields)


def with_format(
    config: ModelConfig,
    weight_format: WeightFormat,
    stored: Mapping[str, TensorEntry] | None = None,
) -> ModelConfig:
    """The config of a checkpoint whose projections are stored in a format.

    Args:
        config: the model's config.
        weight_format: the format.
        stored: the tensors of the checkpoint by name; None if they are not known. Tools leave
            experts in one tensor, and projections outside of attention and MLP, in floats without
            saying so in config.json.

    Raises:
        CheckpointError: modules that are fused here have different schemes, or the format does not
            go together with the model's experts or its latent attention.
    """
    family, stored = FAMILIES[config.architecture], stored or {}
    weights = family.weights_of(config, {name: entry.shape for name, entry in stored.items()})
    _check_experts(config, family.weights(config), weight_format)
    if config.latent is not None and weight_format.kv_scales:
        raise CheckpointError(
            f"config.json: the scales of KV of {config.architecture} are those of its latent, but "
            "keys and values are cached; remove kv_cache_scheme"
        )
    expert_weights = _expert_weights(config, weights)
    experts_only = isinstance(weight_format, OnLoad) and weight_format.experts_only
    on_load = isinstance(weight_format, OnLoad)
    schemes: list[tuple[str, WeightScheme]] = []
    dequantised: list[tuple[str, WeightScheme]] = []
    for weight, pieces in weights.items():
        path = weight.removesuffix(_WEIGHT)
        plain = path.endswith(_PLAIN_PARTS)
        if (experts_only and weight not in expert_weights) or (plain and on_load):
            continue
        in_one = weight in expert_weights and not pieces[0].of_expert
        if (plain or in_one) and not on_load and _in_floats(pieces, stored):
            continue
        if path != weight and (plain or path.endswith(_LINEAR_PARTS)):
            scheme = _common_scheme(pieces, weight_format)
            if scheme != UNQUANTISED:
                (dequantised if plain else schemes).append((path, scheme))
    return dataclasses.replace(
        config,
        format=weight_format,
        schemes=tuple(schemes),
        dequantised=tuple(dequantised),
        kv_scales=weight_format.kv_scales,
    )


def _in_floats(pieces: tuple[Piece, ...], stored: Mapping[str, TensorEntry]) -> bool:
    """Whether a checkpoint has all pieces of a weight in floats."""
    return all(piece.tensor in stored and stored[piece.tensor].dtype in FLOATS for piece in pieces)


def _check_experts(config: ModelConfig, weights: Weights, weight_format: WeightFormat) -> None:
    """Raise CheckpointError unless the format can store the model's experts.

    weights: the pieces of a quantised checkpoint, each expert in tensors of its own if the family
        has such.
    """
    biased = config.experts is not None and config.experts.bias
    if weight_format.biased_experts and not biased:
        raise CheckpointError(
            f"config.json: the weights of {config.architecture} cannot be stored in this format, "
            "which is for the experts of gpt-oss"
        )
    names = _expert_weights(config, weights)
    fused = any(not weights[name][0].of_expert for name in names)
    if fused and not weight_format.biased_experts and not isinstance(weight_format, OnLoad):
        raise CheckpointError(
            f"{config.architecture} has all experts of a layer in one tensor, which checkpoints of "
            f"the quant_method {config.quant_method!r} cannot store"
        )


def _expert_weights(config: ModelConfig, weights: Weights) -> set[str]:
    """The weights of the experts of all layers."""
    return {
        name
        for name in weights
        if name.endswith((".mlp.up.weight", ".mlp.down.weight"))
        and config.has_experts(int(name.split(".")[1]))
    }


def quantization_names() -> list[str]:
    """The names of `with_quantization`: schemes for loading, then formats of checkpoints."""
    return list(dict.fromkeys([*ON_LOAD, *format_names()]))


def with_quantization(config: ModelConfig, quantization: str | None) -> ModelConfig:
    """The config of a checkpoint with the quantization that a user asks for.

    Args:
        config: the model's config, as config.json has it.
        quantization: a name of `ON_LOAD` for an unquantised checkpoint. None, or the
            ``quant_method`` of a quantised one, changes nothing.

    Raises:
        CheckpointError: the checkpoint is quantised in another way, or has not this method; or the
            model has no experts that could be stored in mxfp4.
    """
    if quantization is None:
        return config
    if config.quant_method is not None:
        if config.quant_method == quantization:
            return config
        raise CheckpointError(
            f"quantization is {quantization!r}, but the checkpoint is quantised as "
            f"{config.quant_method!r}; leave it out"
        )
    if quantization not in ON_LOAD:
        raise CheckpointError(
            f"quantization is {quantization!r}, but the checkpoint is not quantised; to quantise "
            f"it while it is loaded, choose one of {', '.join(ON_LOAD)}"
        )
    on_load = OnLoad(ON_LOAD[quantization])
    if on_load.experts_only:
        _check_expert_widths(config, on_load, quantization)
    return with_format(config, on_load)


def _check_expert_widths(config: ModelConfig, on_load: OnLoad, quantization: str) -> None:
    """Raise CheckpointError unless there are experts whose inputs are whole groups."""
    others = ", ".join(name for name in ON_LOAD if not OnLoad(ON_LOAD[name]).experts_only)
    if not any(map(config.has_experts, range(config.num_layers))):
        raise CheckpointError(
            f"{quantization} quantises only the experts of a model, but {config.architecture} has "
            f"none; choose one of {others}"
        )
    _, group = on_load.target.block
    widths = {name: config.axis_sizes[letter] for name, letter in _EXPERT_INPUTS.items()}
    for name, width in widths.items():
        if group is not None and width % group:
            raise CheckpointError(
                f"{quantization} stores {group} inputs of an expert together, but the {name} is "
                f"{width}, no multiple of it; choose one of {others}"
            )


def with_dequantised_weights(config: ModelConfig) -> ModelConfig:
    """The config with all projections in the model's dtype.

    The weights of a quantised checkpoint are dequantised while they are loaded. Those that would be
    quantised then stay as they are.
    """
    on_load = isinstance(config.format, OnLoad)
    return dataclasses.replace(
        config,
        format=None if on_load else config.format,
        schemes=(),
        dequantised=config.dequantised + config.schemes,
    )


def _common_scheme(pieces: tuple[Piece, ...], weight_format: WeightFormat) -> WeightScheme:
    first, *others = (module_of(piece) for piece in pieces)
    scheme = weight_format.scheme(first)
    for other in others:
        found = weight_format.scheme(other)
        if found != scheme:
            raise CheckpointError(
                f"config.json quantises {first} as {scheme.name} and {other} as {found.name} or in "
                "other blocks; projections of the same input must be quantised alike"
            )
    return scheme


def unsupported(fields: ConfigFields) -> CheckpointError:
    """The error for a config.json with none of the supported architectures: what it is instead."""
    found = list(fields.texts("architectures") or ())
    values = fields.values()
    return CheckpointError(
        f"config.json: architectures is {found!s:.200}, which is not supported: "
        f"{_kind(found, values)}. `rjax models` lists those that are"
    )


def _kind(architectures: list[str], values: Mapping[str, Any]) -> str:
    family = _family_of_type(values.get("model_type"))
    if not isinstance(family, Multimodal) and _is_multimodal(values):
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
        known = [name for name in names if isinstance(name, str) and name in TEXT_FAMILIES]
        family = TEXT_FAMILIES[known[0]] if known else _family_of_type(text.get("model_type"))
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


def _family_of_type(model_type: Any) -> Family | Multimodal | None:
    """The family that transformers reads a ``model_type`` as."""
    if not isinstance(model_type, str):
        return None
    takes = [family for family in FAMILIES.values() if model_type in family.fields.model_types]
    own = f"{model_type.replace('_', '')}forcausallm"
    takes.sort(key=lambda family: family.architecture.lower() != own)  # two share their types
    return takes[0] if takes else None
