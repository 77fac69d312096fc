"""The interface of a weight scheme."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.loading.piece import Piece

Initial = Literal["normal", "zeros", "ones"]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a `Linear`.

    Attributes:
        letters: its axes, such as "D K A H".
        dtype: of its values; None for the model's own float type.
        initial: initial values of random weights ("normal" has standard deviation 0.02).
    """

    letters: str
    dtype: DTypeLike | None = None
    initial: Initial = "normal"


class WeightScheme(abc.ABC):
    """How the weight of a `Linear` is stored.

    Schemes are hashable and compare by value (frozen dataclasses): they are part of the compiled
    program. Kernels are chosen by ``name``. If no kernel supports a scheme, the GEMM takes the
    weight from ``dequantise``.
    """

    name: str
    """Short name for kernels and logs, such as "fp8"."""

    @abc.abstractmethod
    def leaves(self, inputs: str, outputs: str) -> Mapping[str, Leaf]:
        """The arrays of a `Linear` from axes ``inputs`` ("D", "N H") to ``outputs`` ("K A H").

        The leaf "weight" has the letters of both. A bias is not part of the scheme.
        """

    @abc.abstractmethod
    def pieces(self, leaf: str, weight: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The checkpoint pieces of a leaf, given those of the unquantised weight."""

    @abc.abstractmethod
    def dequantise(self, leaves: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, "..."]:
        """The reference: the weight in ``dtype``, with axes ``inputs`` then ``outputs``."""
