"""The modules of a checkpoint that are projections, and the scheme of each."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.formats.weight_format import WeightFormat
from rjax.models.loading.piece import Piece
from rjax.models.schemes import UNQUANTISED, WeightScheme

_WEIGHT = ".weight"
_LINEAR_PARTS = (".attention.qkv", ".attention.output", ".mlp.up", ".mlp.down")


def module_of(piece: Piece) -> str:
    """The module of a weight: "model.layers.0.mlp.up_proj"."""
    return piece.tensor.removesuffix(_WEIGHT)


def with_format(config: ModelConfig, weight_format: WeightFormat | None) -> ModelConfig:
    """The config of a checkpoint whose projections are stored in a format.

    Raises:
        CheckpointError: modules that are fused here have different schemes.
    """
    if weight_format is None:
        return config
    schemes = []
    for path, pieces in FAMILIES[config.architecture].weights(config).items():
        if path.endswith(tuple(part + _WEIGHT for part in _LINEAR_PARTS)):
            scheme = _common_scheme(pieces, weight_format)
            if scheme != UNQUANTISED:
                schemes.append((path.removesuffix(_WEIGHT), scheme))
    return dataclasses.replace(config, format=weight_format, schemes=tuple(schemes))


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
