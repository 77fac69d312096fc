"""The definition of a family: its config, and its parameters in a checkpoint."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.field_table import FieldTable
from rjax.models.loading.pieces import Weights

_FUSED = ".experts.gate_up_proj"

type Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the tensors of a checkpoint by name."""


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
        write_config: the inverse of read_config, for families that can be saved.
        fused_weights: the same for checkpoints that have all experts of a layer in one tensor.
        transposed_weights: the same for those whose one tensor has the inputs before the outputs.
        unused: starts of the names of tensors that are not loaded.
    """

    architecture: str
    models: str
    fields: FieldTable
    read_config: Callable[[ConfigFields], ModelConfig]
    weights: Callable[[ModelConfig], Weights]
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None
    fused_weights: Callable[[ModelConfig], Weights] | None = None
    transposed_weights: Callable[[ModelConfig], Weights] | None = None
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda _: ()

    def read(self, fields: ConfigFields, names: Collection[str] | None = None) -> ModelConfig:
        """The ModelConfig of a config.json, with its constraints checked.

        Args:
            fields: the fields of config.json.
            names: the names of the checkpoint's tensors, if they are known.

        Raises:
            CheckpointError: config.json is unusable.
        """
        del names  # those of a text model are always the same
        config = self.read_config(self.fields.check(fields))
        self.fields.check_config(fields, config)
        return config

    def unknown(self, fields: ConfigFields) -> list[str]:
        """Paths of the fields that neither rjax nor transformers knows, sorted."""
        return self.fields.unknown(fields)

    def quantization(self, fields: ConfigFields, config: ModelConfig) -> Any:
        """The ``quantization_config`` of a config.json, or None."""
        del config
        return fields.raw("quantization_config")

    def weights_of(self, config: ModelConfig, shapes: Shapes) -> Weights:
        """The checkpoint pieces of a checkpoint with these tensors."""
        fused = next((shape for name, shape in shapes.items() if name.endswith(_FUSED)), None)
        if self.fused_weights is None or fused is None:
            return self.weights(config)
        if self.transposed_weights is not None and fused[-1] != config.hidden_size:
            return self.transposed_weights(config)
        return self.fused_weights(config)
