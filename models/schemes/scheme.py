"""What a weight scheme says."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.loading.piece import Piece

Initial = Literal["normal", "zeros", "ones"]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a `Linear`.

    Attributes:
        letters: its axes, such as "D K A H".
        dtype: of its values; None for the model's own float type.
        initial: how a model with random weights fills it ("normal" has standard deviation 0.02).
    """

    letters: str
    dtype: DTypeLike | None = None
    initial: Initial = "normal"


class WeightScheme(abc.ABC):
    """How the weight of a `Linear` is stored.

    Schemes are hashable and compare by value (frozen dataclasses): they are part of the compiled
    program. Kernels are chosen by ``name``; where none takes a scheme, the product is computed from
    ``dequantise``.
    """

    name: str
    """Short name for kernels and logs, such as "fp8"."""

    @abc.abstractmethod
    def leaves(self, inputs: str, outputs: str) -> Mapping[str, Leaf]:
        """The arrays of a `Linear` from axes ``inputs`` ("D", "N H") to ``outputs`` ("K A H").

        The leaf "weight" has the letters of both; a bias is not the scheme's.
        """

    @abc.abstractmethod
    def pieces(self, leaf: str, weight: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """Where a checkpoint has a leaf, given where it has the weight without quantisation."""

    @abc.abstractmethod
    def dequantise(self, leaves: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, "..."]:
        """The weight, axes ``inputs`` then ``outputs``, in ``dtype``: the reference."""
