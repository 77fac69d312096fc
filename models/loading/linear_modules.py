"""The modules of a checkpoint that are projections, and the scheme of each."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.formats import ON_LOAD, OnLoad, WeightFormat
from rjax.models.loading.pieces import Piece, Weights, module_of
from rjax.models.schemes import UNQUANTISED, WeightScheme

_WEIGHT = ".weight"
_LINEAR_PARTS = (
    ".attention.qkv",
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

_EXPERT_INPUTS = {"hidden size": "D", "width of an expert": "I"}  # axis letters


def with_format(config: ModelConfig, weight_format: WeightFormat) -> ModelConfig:
    """The config of a checkpoint whose projections are stored in a format.

    Raises:
        CheckpointError: modules that are fused here have different schemes, or the format does not
            go together with the model's experts or its latent attention.
    """
    weights = FAMILIES[config.architecture].weights(config)
    _check_experts(config, weights, weight_format)
    if config.latent is not None and weight_format.kv_scales:
        raise CheckpointError(
            f"config.json: the scales of KV of {config.architecture} are those of its latent, but "
            "keys and values are cached; remove kv_cache_scheme"
        )
    expert_weights = _expert_weights(config, weights)
    experts_only = isinstance(weight_format, OnLoad) and weight_format.experts_only
    schemes = []
    for path, pieces in weights.items():
        if experts_only and path not in expert_weights:
            continue
        if path.endswith(tuple(part + _WEIGHT for part in _LINEAR_PARTS)):
            scheme = _common_scheme(pieces, weight_format)
            if scheme != UNQUANTISED:
                schemes.append((path.removesuffix(_WEIGHT), scheme))
    return dataclasses.replace(
        config,
        format=weight_format,
        schemes=tuple(schemes),
        kv_scales=weight_format.kv_scales,
    )


def _check_experts(config: ModelConfig, weights: Weights, weight_format: WeightFormat) -> None:
    """Raise CheckpointError unless the format can store the model's experts."""
    in_one = weight_format.expert_tensors("", (1, 32, 32)) is not None
    biased = config.experts is not None and config.experts.bias
    if in_one and not biased:
        raise CheckpointError(
            f"config.json: the weights of {config.architecture} cannot be stored in this format, "
            "which is for the experts of gpt-oss"
        )
    names = _expert_weights(config, weights)
    fused = any(not weights[name][0].of_expert for name in names)
    if fused and not in_one and not isinstance(weight_format, OnLoad):
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
            f"quantization is {quantization!r}, which quantises only the experts of a model, but "
            f"{config.architecture} has none; choose one of {others}"
        )
    _, group = on_load.target.block
    widths = {name: config.axis_sizes[letter] for name, letter in _EXPERT_INPUTS.items()}
    for name, width in widths.items():
        if group is not None and width % group:
            raise CheckpointError(
                f"quantization is {quantization!r}, which stores {group} inputs of an expert "
                f"together, but the {name} is {width}, no multiple of it; choose one of {others}"
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
        dequantised=config.schemes,
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
