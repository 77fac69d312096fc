"""What kernels know of how a weight is stored."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@runtime_checkable
class WeightStorage(Protocol):
    """How a weight is stored: hashable, compared by value."""

    @property
    def name(self) -> str:
        """Short name for logs, such as "fp8"; "unquantised" for floats as they are."""
        ...

    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The reference: the weight, its ``depth`` inputs merged and its outputs merged."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledLayout:
    """The weight of one device as values of few bits with scales.

    Attributes:
        values: name of the type of the values, such as "int4".
        dtype: dtype in which values are stored.
        block: (outputs, inputs) that share a scale.
        channels: each output has one scale, whatever its number of inputs.
        zero_points: whether there are zero points.
        interleaving: inputs that are reordered among themselves (`few_bits.interleaving`), if
            a multiple of them is stored; None for plain order.
    """

    values: str
    dtype: np.dtype
    block: tuple[int, int]
    channels: bool
    zero_points: bool
    interleaving: int | None

    def is_interleaved(self, inputs: int) -> bool:
        """Whether a weight whose last axis has so many inputs is stored interleaved."""
        return self.interleaving is not None and inputs % self.interleaving == 0
