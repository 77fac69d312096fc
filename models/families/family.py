"""What a family says: its config, and where its parameters are in a checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

from models.config import ModelConfig
from models.config_fields import ConfigFields
from models.families.field_table import FieldTable
from models.loading.piece import Weights


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
