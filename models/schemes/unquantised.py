"""Weights in the model's own float type."""

import dataclasses
from collections.abc import Mapping

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.loading.piece import Piece
from rjax.models.schemes.scheme import Leaf, WeightScheme


@dataclasses.dataclass(frozen=True, slots=True)
class Unquantised(WeightScheme):
    """One leaf, the weight."""

    name: str = "unquantised"

    def leaves(self, inputs: str, outputs: str) -> Mapping[str, Leaf]:
        """The weight."""
        return {"weight": Leaf(f"{inputs} {outputs}")}

    def pieces(self, leaf: str, weight: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The pieces of the weight."""
        del leaf
        return weight

    def dequantise(self, leaves: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, "..."]:
        """The weight."""
        return leaves["weight"].astype(dtype)


UNQUANTISED = Unquantised()
