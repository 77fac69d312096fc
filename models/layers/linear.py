"""A projection that owns all of its arrays."""

import math
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.layers.parameter import parameter


class Linear(nnx.Module):
    """A projection from some axes to others.

    The weight has the axes of both, inputs first; the config's weight scheme says of which leaves
    it consists. Loading, random weights and sharding follow from the leaves' axis letters.

    Args:
        inputs: axes that are contracted, such as "D" or "N H".
        outputs: axes of the result after T, such as "K A H".
        config: gives each letter its size, and the weight scheme.
        dtype: float type of the result, of the bias and of leaves without a type of their own.
        a: size of axis A, along which projections are fused.
        bias: whether it has one; of shape ``outputs``.
    """

    def __init__(
        self,
        inputs: str,
        outputs: str,
        config: ModelConfig,
        dtype: DTypeLike,
        *,
        a: int = 1,
        bias: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.scheme = inputs, outputs, config.scheme
        leaves = self.scheme.leaves(inputs, outputs)
        self.leaf_letters = tuple((name, leaf.letters) for name, leaf in leaves.items())
        for name, leaf in leaves.items():
            own = dtype if leaf.dtype is None else leaf.dtype
            setattr(self, name, parameter(leaf.letters, config, own, leaf.initial, a))
        self.bias = parameter(outputs, config, dtype, "zeros", a) if bias else None
        sizes = config.axis_sizes | {"A": a}
        self.input_shape = tuple(sizes[letter] for letter in inputs.split())
        self.output_shape = tuple(sizes[letter] for letter in outputs.split())

    @property
    def depth(self) -> int:
        """Entries that are contracted."""
        return math.prod(self.input_shape)

    @property
    def leaves(self) -> Mapping[str, Array]:
        """The arrays of the weight by name, without the bias."""
        return {name: getattr(self, name)[...] for name, _ in self.leaf_letters}

    def weight_matrix(self, dtype: DTypeLike) -> Float[Array, "E ..."]:
        """The dequantised weight with its input axes as one."""
        # As one axis: over two axes, XLA on the CPU would copy the weights at every call.
        weight = self.scheme.dequantise(self.leaves, dtype)
        return weight.reshape(self.depth, *self.output_shape)
