"""The interface of a weight format: how a checkpoint stores the weights of a scheme."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.schemes import WeightScheme

FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of a tensor of floats in a safetensors file."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that stores a weight, or a part of one.

    Attributes:
        name: name in the checkpoint.
        shapes: allowed shapes.
        types: allowed types, as safetensors names them.
        axes: axis of the weight that each axis follows, outputs or inputs, packed or grouped or
            not; None for an axis of its own.
        check: finds what is wrong with the values, on the host before anything is loaded; its
            problem completes the sentence "the tensor ...".
        required: whether it must be there.
        missing: why it must be there, for the error if it is not.
        used: whether the weight is made of it; others are only checked.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    axes: tuple[Literal["outputs", "inputs"] | None, ...] = (None,)
    check: Callable[[np.ndarray], str | None] | None = None
    required: bool = True
    missing: str = ""
    used: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What the stored tensors of a module are decoded to.

    Attributes:
        scheme: weight scheme of the module.
        shape: (outputs, inputs) of the weight.
        blocks: (outputs, inputs) of the weight that share an entry, for each array of the scheme.
    """

    scheme: WeightScheme
    shape: tuple[int, int]
    blocks: Mapping[str, tuple[int, int]]


class WeightFormat(abc.ABC):
    """How a checkpoint stores the weights of the projections.

    Formats are hashable and compare by value (frozen dataclasses): they are part of the programs
    that make the arrays of a `Linear` from stored tensors.
    """

    kv_scales: bool = False
    """Whether each attention module has the tensors ``k_scale`` and ``v_scale``."""
    biased_experts: ClassVar[bool] = False
    """Whether it is for experts with biases alone, all of a layer in one tensor, as gpt-oss has
    them."""

    @abc.abstractmethod
    def scheme(self, module: str) -> WeightScheme:
        """How the weight of a module, such as "model.layers.0.mlp.up_proj", is to be stored."""

    @abc.abstractmethod
    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """The tensors of a module by role, given the (outputs, inputs) of its weight."""

    @abc.abstractmethod
    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The arrays of the scheme from the stored tensors, by role; traced.

        Each has the outputs first: (outputs, inputs), or (outputs,) where the inputs share all
        entries, both divided by its block. The caller converts it to the dtype of its leaf.
        """

    def expert_tensors(
        self, tensor: str, shape: tuple[int, int, int]
    ) -> Mapping[str, StoredTensor] | None:
        """The tensors by role that hold a weight of all experts of a layer, given its (experts,
        outputs, inputs); None if the format stores each expert as a module of its own."""
        del tensor, shape
        return None

    def decode_experts(
        self, stored: Mapping[str, jax.Array], target: Target
    ) -> dict[str, jax.Array]:
        """Decode the weights of all experts of a layer; traced.

        The stored tensors have the experts first, and the arrays have them before the outputs. The
        default decodes one expert after another.
        """

        def decode_expert(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            # A loop stores bytes, not half bytes.
            return {
                name: leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf
                for name, leaf in self.decode(own, target).items()
            }

        return jax.lax.map(decode_expert, stored)

    def with_scale_types(self, types: Mapping[str, str]) -> "WeightFormat":
        """The format with scales as the checkpoint has them, given its tensors' types by name."""
        del types
        return self
