"""The interface of a weight scheme."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Literal

from jax.typing import DTypeLike
from jaxtyping import Array, Float

Initial = Literal["normal", "zeros", "ones", "integers"] | float


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a `Linear`.

    Attributes:
        letters: its axes, such as "D K A H".
        dtype: dtype of its values; None for the model's own float type.
        initial: initial values of random weights: "normal" has standard deviation 0.02, "integers"
            are uniform over the dtype's range, a number is the value of all.
        blocks: (letter, size) of each axis along which ``size`` neighbouring entries of the weight
            share one entry of this array.
    """

    letters: str
    dtype: DTypeLike | None = None
    initial: Initial = "normal"
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def of_experts(self) -> "Leaf":
        """The same array of all experts of a layer, with an axis J before the others."""
        return dataclasses.replace(self, letters=f"J {self.letters}")


class WeightScheme(abc.ABC):
    """How the weight of a `Linear` is stored on the devices.

    Schemes are hashable and compare by value (frozen dataclasses): they are part of the compiled
    program. Kernels are chosen by ``name``. If no kernel supports a scheme, the GEMM takes the
    weight from ``dequantise``.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Short name for kernels and logs, such as "fp8"."""

    @property
    def for_experts(self) -> "WeightScheme":
        """The scheme that stores each of a layer's experts; its leaves get an axis J before them.

        The default is the scheme itself.
        """
        return self

    @abc.abstractmethod
    def leaves(self, inputs: str, outputs: str, sizes: Mapping[str, int]) -> Mapping[str, Leaf]:
        """The arrays of a `Linear` from axes ``inputs`` ("D", "N H") to ``outputs`` ("K A H").

        The leaf "weight" has the letters of both. A bias is not part of the scheme.

        Args:
            inputs, outputs: axis letters.
            sizes: size of each axis letter in the whole model, but for A.
        """

    def is_interleaved(self, shape: tuple[int, ...]) -> bool:
        """Whether values of a shape, inputs last, are reordered among neighbouring inputs."""
        del shape
        return False

    def arrange(self, leaves: Mapping[str, Array]) -> Mapping[str, Array]:
        """The leaves in the order in which their values are stored, from those in plain order.

        The default stores them in plain order.
        """
        return leaves

    @abc.abstractmethod
    def dequantise(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The reference: the weight in ``dtype``, its ``depth`` inputs merged, its outputs merged.

        Its values are in plain order.

        The leaves may be those of one device of a mesh.
        """

    def dequantise_plain(
        self, leaves: Mapping[str, Array], depth: int, dtype: DTypeLike
    ) -> Float[Array, "E X"]:
        """The same of leaves in plain order, before ``arrange``."""
        return self.dequantise(self.arrange(leaves), depth, dtype)
