"""Linear projections, whose arrays follow from a weight scheme."""

import functools
import math
from collections.abc import Mapping

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import array_bytes, leaf_parameter
from rjax.models.schemes import Leaf, WeightScheme


class Linear(nnx.Module):
    """A projection from some axes to others.

    The weight has the axes of both, inputs first. The weight scheme defines the arrays (leaves)
    that store it. Loading, random weights and sharding follow from their axis letters. A layer's
    experts are one projection whose leaves and bias have an axis J before the others. A mesh cuts
    the width I of every expert, or, if the config's experts are parallel, J.

    Args:
        inputs: contracted axes, such as "D" or "N H".
        outputs: axes of the result after T, such as "K A H".
        config: size of each axis letter.
        scheme: how the weight is stored.
        dtype: dtype of the result, the bias and the leaves that do not set their own.
        a: size of axis A, along which projections are fused.
        bias: whether there is a bias, of shape ``outputs``.
        experts: whether it is the projection of all experts of a layer.
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
        experts: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.scheme = inputs, outputs, scheme
        sizes = config.axis_sizes | {"A": a}
        self.num_experts = sizes["J"] if experts else 0
        self.expert_parallel = experts and config.experts is not None and config.experts.parallel
        leaves = self.storage.leaves(inputs, outputs, config.axis_sizes)
        of_bias = Leaf(outputs, initial="zeros")
        if experts:
            leaves = {name: leaf.of_experts for name, leaf in leaves.items()}
            of_bias = of_bias.of_experts
        self.leaf_letters = tuple((name, leaf.letters) for name, leaf in leaves.items())
        make = functools.partial(
            leaf_parameter, sizes=sizes, dtype=dtype, expert_parallel=self.expert_parallel
        )
        for name, leaf in leaves.items():
            setattr(self, name, make(leaf))
        self.bias = make(of_bias) if bias else None
        self.input_shape = tuple(sizes[letter] for letter in inputs.split())
        self.output_shape = tuple(sizes[letter] for letter in outputs.split())

    @property
    def storage(self) -> WeightScheme:
        """How the leaves store the weight: ``scheme``, or its form for experts."""
        return self.scheme.for_experts if self.num_experts else self.scheme

    @property
    def depth(self) -> int:
        """Size of the contracted axes."""
        return math.prod(self.input_shape)

    @property
    def leaves(self) -> Mapping[str, Array]:
        """The arrays of the weight by name, without the bias."""
        return {name: getattr(self, name)[...] for name, _ in self.leaf_letters}

    @property
    def bias_array(self) -> Array | None:
        """The bias, or None."""
        return None if self.bias is None else self.bias[...]

    def leaf_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a leaf, abstract or not."""
        return getattr(self, name).shape

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight as it is stored, without the bias."""
        return array_bytes([getattr(self, name).get_value() for name, _ in self.leaf_letters])

    def weight_matrix(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The dequantised weight with its input axes merged into one; J, if any, before it."""
        dequantise = functools.partial(self.dequantise, dtype=dtype)
        return (jax.vmap(dequantise) if self.num_experts else dequantise)(self.leaves)

    def dequantise(self, leaves: Mapping[str, Array], dtype: DTypeLike) -> Float[Array, "E ..."]:
        """`weight_matrix` from given leaves; those of one expert, without J."""
        # With two contracted axes, XLA on the CPU would copy the weights at every call.
        weight = self.storage.dequantise(leaves, self.depth, dtype)
        return weight.reshape(self.depth, *self.output_shape)
