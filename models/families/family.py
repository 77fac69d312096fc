"""What a family says: its config, and where its parameters are in a checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

from models.config import ModelConfig
from models.config_fields import ConfigFields
from models.families.field_table import FieldTable


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, or some of its rows, as a part of one parameter.

    Attributes:
        tensor: name in the checkpoint.
        pattern: axes of the tensor in axis letters, those it has merged in brackets, such as
            "(K A H) D". The parameter has the same letters in its own order.
        a: how many entries of the fused axis A this piece fills; pieces fill it in order.
        first_row: where the piece begins in the first axis of the tensor.
        rows: size of the whole first axis of the tensor; None where the piece is all of it.
    """

    tensor: str
    pattern: str
    a: int = 1
    first_row: int = 0
    rows: int | None = None


# Parameter path, such as "layers.0.attention.qkv", to its pieces.
Weights = dict[str, tuple[Piece, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class name in config.json.
        fields: what each field of its config.json is to it.
        read_config: its config.json to ours, from the fields that it reads.
        weights: the pieces of every parameter.
        write_config: the inverse of read_config, for the families that can be saved.
    """

    architecture: str
    fields: FieldTable
    read_config: Callable[[ConfigFields], ModelConfig]
    weights: Callable[[ModelConfig], Weights]
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None
