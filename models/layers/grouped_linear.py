"""The projections of all experts of a layer, as one array."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import array_bytes, parameter


class GroupedLinear(nnx.Module):
    """A projection for each expert, from some axes to others.

    The weight has the axis J of the experts before the axes of a `Linear`. It is not quantised.

    Args:
        inputs: contracted axes.
        outputs: axes of the result after T.
        config: size of each axis letter.
        dtype: of the result and the weight.
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
        a: int = 1,
        bias: bool,
    ) -> None:
        self.letters = f"J {inputs} {outputs}"
        self.weight = parameter(self.letters, config, dtype, a=a)
        self.bias = parameter(f"J {outputs}", config, dtype, "zeros", a) if bias else None

    @property
    def bias_array(self) -> Array | None:
        """The biases of all experts, or None."""
        return None if self.bias is None else self.bias[...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, [J, ...]."""
        return self.weight.get_value().shape

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return array_bytes([self.weight.get_value()])
