"""The definition of a family: its config, and its parameters in a checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.field_table import FieldTable
from rjax.models.loading.piece import Weights


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class name in config.json.
        models: names of well-known models.
        fields: how each field of its config.json is used.
        read_config: converts the fields of config.json to a ModelConfig.
        weights: the checkpoint pieces of every parameter.
        write_config: the inverse of read_config, for families that can be saved.
    """

    architecture: str
    models: str
    fields: FieldTable
    read_config: Callable[[ConfigFields], ModelConfig]
    weights: Callable[[ModelConfig], Weights]
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None
