"""How a checkpoint is to be quantised, and the ``quantization_config`` that says so."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.loading.config import with_quantization
from rjax.models.loading.pieces import Piece, tensor_shape
from rjax.models.quantising.projections import linear_pieces

QuantisingScheme = Literal["fp8", "int8", "int4", "awq", "mxfp4"]

SCHEMES: tuple[QuantisingScheme, ...] = ("fp8", "int8", "int4", "awq", "mxfp4")
"""llm-compressor's FP8_DYNAMIC, W8A8, W4A16, and W4A16_ASYM with scales searched on prompts; and
the experts in MXFP4, as gpt-oss is published."""

GROUP_SIZES = (128, 64, 32)

_VERSION = "0.19.0"
"""Version of compressed-tensors whose layout is written."""
_FORMATS = {"fp8": "float-quantized", "int8": "int-quantized"}
_NOT_IN_MXFP4 = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")


@dataclasses.dataclass(frozen=True, slots=True)
class QuantisingSettings:
    """How the projections are quantised.

    Attributes:
        scheme: one of `SCHEMES`.
        group_size: inputs that share a scale; None for all.
        symmetric: there are no zero points.
    """

    scheme: QuantisingScheme
    group_size: int | None = None
    symmetric: bool = True

    @property
    def calibrated(self) -> bool:
        """Whether prompts are needed."""
        return self.scheme == "awq"

    @property
    def experts_only(self) -> bool:
        """Whether only experts are quantised."""
        return self.scheme == "mxfp4"

    @property
    def format(self) -> str:
        """Name of the format in compressed-tensors, or "mxfp4"."""
        if self.experts_only:
            return self.scheme
        return _FORMATS.get(self.scheme, "pack-quantized")

    def quantization_config(self, ignored: Sequence[str] = ()) -> dict[str, Any]:
        """The object for config.json, with the fields of the published checkpoints.

        Args:
            ignored: modules that are not quantised, beside the output projection.
        """
        if self.experts_only:
            kept = [*_NOT_IN_MXFP4, "lm_head"]
            return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
        kind = "float" if self.scheme == "fp8" else "int"
        grouped = self.group_size is not None
        weights = _arguments(
            num_bits=4 if grouped else 8,
            type=kind,
            strategy="group" if grouped else "channel",
            group_size=self.group_size,
            symmetric=self.symmetric,
            observer="mse" if grouped else "memoryless_minmax",
            zp_dtype=None if self.symmetric else "torch.int8",
        )
        # Scales of activations are computed for each token while the model runs.
        activations = _arguments(num_bits=8, type=kind, strategy="token", dynamic=True)
        group = {
            "format": self.format,
            "input_activations": None if grouped else activations,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": weights,
        }
        return {
            "config_groups": {"group_0": group},
            "format": self.format,
            "global_compression_ratio": None,
            "ignore": ["lm_head", *ignored],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _VERSION,
        }


def _arguments(**given: Any) -> dict[str, Any]:
    """The fields of weights or activations in the order of compressed-tensors."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": None,
        "symmetric": True,
        "type": None,
        "zp_dtype": None,
    } | given


def choose_settings(
    config: ModelConfig,
    scheme: QuantisingScheme,
    group_size: int | None = None,
    symmetric: bool = False,
) -> QuantisingSettings:
    """The settings of a scheme for a model.

    Args:
        config: the model's config.
        scheme: one of `SCHEMES`.
        group_size: inputs that share a scale in "int4" and "awq"; None for the largest of
            `GROUP_SIZES` that divides the inputs of all projections.
        symmetric: no zero points for "awq"; the other schemes have none.

    Raises:
        CheckpointError: the model is quantised already, its experts cannot be quantised so, or
            groups do not divide its projections.
        ValueError: the scheme or the group size does not exist.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme is {scheme!r}; it must be one of {', '.join(SCHEMES)}")
    if config.quant_method is not None:
        raise CheckpointError(
            f"the model is quantised already, as {config.quant_method!r}; give the unquantised "
            "checkpoint"
        )
    pieces = [piece for of_linear in linear_pieces(config).values() for piece in of_linear]
    if scheme == "mxfp4":
        return _mxfp4_settings(config, group_size)
    if config.latent is not None and scheme == "awq":
        raise CheckpointError(
            f"{config.architecture} has latent attention, for which awq has no search; choose fp8, "
            "int8 or int4"
        )
    if config.layers and scheme == "awq":
        raise CheckpointError(
            f"{config.architecture} has layers of different sizes, for which awq has no search; "
            "choose fp8, int8 or int4"
        )
    if config.experts is not None:
        _check_experts(config, scheme, pieces)
    if scheme in _FORMATS:
        if group_size is not None:
            raise ValueError(f"group_size is {group_size}; {scheme} has no groups")
        return QuantisingSettings(scheme)
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size is {group_size}; it must be one of {', '.join(map(str, GROUP_SIZES))}"
        )
    inputs = sorted({tensor_shape(piece, config)[1] for piece in pieces})
    sizes = GROUP_SIZES if group_size is None else (group_size,)
    for size in sizes:
        if not any(count % size for count in inputs):
            return QuantisingSettings(scheme, size, symmetric or scheme == "int4")
    shown = " nor ".join(map(str, sizes))
    raise CheckpointError(
        f"the projections have {', '.join(map(str, inputs))} inputs, which groups of {shown} do "
        "not divide; choose another group size, or fp8 or int8"
    )


def _mxfp4_settings(config: ModelConfig, group_size: int | None) -> QuantisingSettings:
    """The settings of "mxfp4", for a model with experts that a checkpoint can store so."""
    if group_size is not None:
        raise ValueError(f"group_size is {group_size}; mxfp4 has groups of 32")
    with_quantization(config, "mxfp4")
    if config.experts is None or not config.experts.bias:
        raise CheckpointError(
            f"{config.architecture} has experts that checkpoints in mxfp4 cannot store: their "
            "format is that of gpt-oss; quantise it on load with quantization"
        )
    return QuantisingSettings("mxfp4", group_size=32)


def _check_experts(config: ModelConfig, scheme: QuantisingScheme, pieces: list[Piece]) -> None:
    """Raise CheckpointError unless the experts of a model can be quantised by a scheme."""
    if scheme == "awq":
        raise CheckpointError(
            f"{config.architecture} has a mixture of experts, for which awq has no search; choose "
            "fp8, int8 or int4"
        )
    if any("J" in piece.pattern for piece in pieces):
        raise CheckpointError(
            f"{config.architecture} has all experts of a layer in one tensor, which the format "
            "cannot store; quantise it on load with quantization"
        )
