"""Weights that a checkpoint stores as floats, each in one tensor."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rjax.models.formats.module_names import is_head
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.schemes import UNQUANTISED, Scaled, WeightScheme


class FloatWeights(WeightFormat):
    """Each row of a weight can be read and decoded alone."""

    def tensors(self, module: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """The weight."""
        return {"weight": StoredTensor(f"{module}.weight", (shape,), FLOATS, ("outputs", "inputs"))}


@dataclasses.dataclass(frozen=True, slots=True)
class Plain(FloatWeights):
    """A parameter with the axes of its tensor, of any rank.

    Attributes:
        dtype: dtype of the parameter.
        offset: added to the values, in this dtype.
    """

    dtype: np.dtype
    offset: float = 0.0

    def scheme(self, module: str) -> WeightScheme:
        """Nothing is quantised."""
        return UNQUANTISED

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The values in the parameter's dtype."""
        weight = stored["weight"].astype(self.dtype)
        return {"weight": weight + self.offset if self.offset else weight}


@dataclasses.dataclass(frozen=True, slots=True)
class OnLoad(FloatWeights):
    """An unquantised weight, rounded to nearest.

    The output projection is not quantised, nor are those outside of experts in a type for experts
    only.

    Attributes:
        target: the scheme.
    """

    target: Scaled

    @property
    def experts_only(self) -> bool:
        """Whether only experts are quantised."""
        return self.target.type.experts_only

    def scheme(self, module: str) -> WeightScheme:
        """The target scheme for all projections but the output projection."""
        return UNQUANTISED if is_head(module) else self.target

    def decode(self, stored: Mapping[str, jax.Array], target: Target) -> dict[str, jax.Array]:
        """The weight, quantised in the blocks in which the scales are stored."""
        assert isinstance(target.scheme, Scaled)
        weight = stored["weight"].reshape(target.shape).astype(jnp.float32)
        return target.scheme.quantise(weight, target.blocks["weight_scale"])
