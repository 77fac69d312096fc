"""Weights in the model's own float type."""

import dataclasses
from collections.abc import Mapping

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.schemes.scheme import Leaf, WeightScheme


@dataclasses.dataclass(frozen=True, slots=True)
class Unquantised(WeightScheme):
    """One leaf, the weight."""

    @property
    def name(self) -> str:
        """Name for kernels."""
        return "unquantised"

    def leaves(self, inputs: str, outputs: str, sizes: Mapping[str, int]) -> Mapping[str, Leaf]:
        """The weight."""
        return {"weight": Leaf(f"{inputs} {outputs}")}

    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The weight."""
        return leaves["weight"].astype(dtype).reshape(depth, -1)


UNQUANTISED = Unquantised()
