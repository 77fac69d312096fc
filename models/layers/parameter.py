"""Parameters with named axes."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.schemes.scheme import Initial


def parameter(
    letters: str, config: ModelConfig, dtype: DTypeLike, initial: Initial = "normal", a: int = 1
) -> nnx.Param:
    """An abstract parameter: shape and dtype, no memory. Loading gives it its values.

    Args:
        letters: its axes, such as "D K A H"; A is the axis along which projections are fused.
        config: gives each letter its size.
        dtype: of the values.
        initial: initial values of random weights ("normal" has standard deviation 0.02).
        a: size of axis A.
    """
    sizes = config.axis_sizes | {"A": a}
    shape = tuple(sizes[letter] for letter in letters.split())
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), letters=letters, initial=initial)
