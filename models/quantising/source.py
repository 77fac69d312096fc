"""The tensors of a checkpoint that is to be quantised, each expert in tensors of its own."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from rjax.models.config import ModelConfig
from rjax.models.families import FAMILIES
from rjax.models.loading.match import Expected, match
from rjax.models.loading.pieces import Piece, Weights, tensor_shape, view
from rjax.models.loading.tensors import TensorEntry, read_tensors


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The tensors under the names that a quantised checkpoint has for them.

    Unquantised checkpoints of many families have all experts of a layer in one tensor, quantised
    ones have not.

    Attributes:
        config: the model's config.
        weights: the pieces of the quantised checkpoint.
        stored: the pieces of this one.
        entries: its tensors by name.
    """

    config: ModelConfig
    weights: Weights
    stored: Weights
    entries: Mapping[str, TensorEntry]

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of each tensor as it is stored."""
        return {
            piece.tensor: self.entries[stored.tensor].stored_dtype()
            for path in self.weights
            for piece, stored in self._pairs(path)
        }

    def read(self, layer: int | None) -> dict[str, np.ndarray]:
        """The tensors of a layer, or of what is outside the layers, in the order of the family."""
        start = "layers." if layer is None else f"layers.{layer}."
        paths = [path for path in self.weights if path.startswith(start) == (layer is not None)]
        found: dict[str, np.ndarray] = {}
        for path in paths:
            if self._splits(path):
                found |= self._split(path)
                continue
            for piece, stored in self._pairs(path):
                if piece.tensor not in found:
                    tensor = self.entries[stored.tensor].read()
                    found[piece.tensor] = tensor.reshape(tensor_shape(piece, self.config))
        return found

    def _splits(self, path: str) -> bool:
        """Whether one tensor has the weight of all experts."""
        return self.weights[path][0].of_expert and not self.stored[path][0].of_expert

    def _pairs(self, path: str) -> list[tuple[Piece, Piece]]:
        """(a piece, the one of this checkpoint that has its values) of a parameter."""
        pieces, stored = self.weights[path], self.stored[path]
        return list(
            zip(pieces, stored * len(pieces) if self._splits(path) else stored, strict=True)
        )

    def _split(self, path: str) -> Iterator[tuple[str, np.ndarray]]:
        """The name and [outputs, inputs] of each projection of each expert, from one tensor."""
        (fused,) = self.stored[path]
        letters = "J A I D" if fused.a > 1 else "J D I"
        axes = view(fused, letters, self.config)
        tensor = self.entries[fused.tensor].read().reshape(axes.shape).transpose(axes.order)
        matrices = tensor.reshape(-1, *tensor.shape[-2:])
        for piece, matrix in zip(self.weights[path], matrices, strict=True):
            yield piece.tensor, np.ascontiguousarray(matrix)


def read_source(config: ModelConfig, folder: Path) -> Source:
    """The tensors of a folder; raises CheckpointError if they are not those of the model."""
    family, tensors = FAMILIES[config.architecture], read_tensors(folder)
    stored = family.weights_of(config, {name: entry.shape for name, entry in tensors.items()})
    entries = match(Expected(stored, (), family.unused(config)), tensors, config, folder)
    return Source(config, family.weights(config), stored, entries)
