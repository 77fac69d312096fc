"""Linear projections, whose arrays follow from a weight scheme."""

import math
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import array_bytes, leaf_parameter, parameter
from rjax.models.schemes import WeightScheme


class Linear(nnx.Module):
    """A projection from some axes to others.

    The weight has the axes of both, inputs first. The weight scheme defines the arrays (leaves)
    that store it. Loading, random weights and sharding follow from their axis
    letters.

    Args:
        inputs: contracted axes, such as "D" or "N H".
        outputs: axes of the result after T, such as "K A H".
        config: size of each axis letter.
        scheme: how the weight is stored.
        dtype: dtype of the result, the bias and the leaves that do not set their own.
        a: size of axis A, along which projections are fused.
        bias: whether there is a bias, of shape ``outputs``.
    """

    def __init__(
        self,
        inputs: str,
        outputs: str,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        scheme: WeightScheme,
        a: int = 1,
        bias: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.scheme = inputs, outputs, scheme
        sizes = config.axis_sizes | {"A": a}
        leaves = scheme.leaves(inputs, outputs, config.axis_sizes)
        self.leaf_letters = tuple((name, leaf.letters) for name, leaf in leaves.items())
        for name, leaf in leaves.items():
            setattr(self, name, leaf_parameter(leaf, sizes, dtype))
        self.bias = parameter(outputs, config, dtype, "zeros", a) if bias else None
        self.input_shape = tuple(sizes[letter] for letter in inputs.split())
        self.output_shape = tuple(sizes[letter] for letter in outputs.split())

    @property
    def depth(self) -> int:
        """Size of the contracted axes."""
        return math.prod(self.input_shape)

    @property
    def leaves(self) -> Mapping[str, Array]:
        """The arrays of the weight by name, without the bias."""
        return {name: getattr(self, name)[...] for name, _ in self.leaf_letters}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight as it is stored, without the bias."""
        return array_bytes([getattr(self, name).get_value() for name, _ in self.leaf_letters])

    def weight_matrix(self, dtype: DTypeLike) -> Float[Array, "E ..."]:
        """The dequantised weight with its input axes merged into one."""
        # With two contracted axes, XLA on the CPU would copy the weights at every call.
        weight = self.scheme.dequantise(self.leaves, self.depth, dtype)
        return weight.reshape(self.depth, *self.output_shape)
