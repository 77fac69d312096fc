"""The definition of a family: its config, and its parameters in a checkpoint."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.field_table import FieldTable
from rjax.models.loading.pieces import Weights

_FUSED = ".experts.gate_up_proj"


def layers_after_the_last(config: ModelConfig) -> tuple[str, ...]:
    """The start of the tensors of layers that predict further tokens; they are not used."""
    return (f"model.layers.{config.num_layers}.",)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    Attributes:
        architecture: its class name in config.json.
        models: names of well-known models.
        fields: how each field of its config.json is used.
        read_config: converts the fields of config.json to a ModelConfig.
        weights: the checkpoint pieces of every parameter.
        fused_weights: the same for checkpoints that have all experts of a layer in one tensor.
        unused: starts of the names of tensors that are not loaded.
        write_config: the inverse of read_config, for families that can be saved.
    """

    architecture: str
    models: str
    fields: FieldTable
    read_config: Callable[[ConfigFields], ModelConfig]
    weights: Callable[[ModelConfig], Weights]
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None
    fused_weights: Callable[[ModelConfig], Weights] | None = None
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda _: ()

    def weights_of(self, config: ModelConfig, tensors: Iterable[str]) -> Weights:
        """The checkpoint pieces of a checkpoint with these tensors."""
        if self.fused_weights is not None and any(name.endswith(_FUSED) for name in tensors):
            return self.fused_weights(config)
        return self.weights(config)
