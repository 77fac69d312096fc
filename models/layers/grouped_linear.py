"""The projections of all experts of a layer, as one array."""

import functools
from collections.abc import Mapping

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import array_bytes, leaf_parameter, parameter
from rjax.models.schemes import WeightScheme
from rjax.models.schemes.grouped import dequantise_expert, grouped_leaves


class GroupedLinear(nnx.Module):
    """A projection for each expert, from one axis to others.

    The weight scheme defines the arrays (leaves) that store the weights of all experts, as those of
    a `Linear` with an axis J (`schemes.grouped`).

    Args:
        inputs: contracted axis.
        outputs: axes of the result after T.
        config: size of each axis letter.
        dtype: dtype of the result, the bias and the leaves that do not set their own.
        scheme: how the weights are stored. A mesh cuts the width I of every expert, or, if the
            config's experts are parallel, spreads whole experts over the devices.
        a: size of axis A, along which projections are fused.
        bias: whether there are biases, of shape [J, outputs].
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
        bias: bool,
    ) -> None:
        self.inputs, self.outputs, self.scheme = inputs, outputs, scheme
        self.expert_parallel = parallel = config.experts is not None and config.experts.parallel
        sizes = config.axis_sizes | {"A": a}
        leaves = grouped_leaves(scheme, inputs, outputs, sizes)
        self.leaf_letters = tuple((name, leaf.letters) for name, leaf in leaves.items())
        for name, leaf in leaves.items():
            setattr(self, name, leaf_parameter(leaf, sizes, dtype, expert_parallel=parallel))
        biases = functools.partial(parameter, f"J {outputs}", config, dtype, "zeros", a)
        self.bias = biases(expert_parallel=parallel) if bias else None
        self.letters = f"J {inputs} {outputs}"
        self.shape = tuple(sizes[letter] for letter in self.letters.split())

    @property
    def bias_array(self) -> Array | None:
        """The biases of all experts, or None."""
        return None if self.bias is None else self.bias[...]

    @property
    def leaves(self) -> Mapping[str, Array]:
        """The arrays of the weights by name, without the biases."""
        return {name: getattr(self, name)[...] for name, _ in self.leaf_letters}

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a leaf, abstract or not."""
        return getattr(self, name).get_value().shape

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are stored, without the biases."""
        return array_bytes([getattr(self, name).get_value() for name, _ in self.leaf_letters])

    def expert_weight(self, leaves: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, "E ..."]:
        """The dequantised weight of one expert, given its leaves."""
        return dequantise_expert(self.scheme, leaves, dtype)
