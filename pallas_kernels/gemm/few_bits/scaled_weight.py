"""The operand of a quantised GEMM: matrices of few bits and their scales."""

import dataclasses
import math
from collections.abc import Mapping
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from rjax.pallas_kernels.gemm.few_bits.interleaving import natural


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class ScaledWeight:
    """W matrices: weight = (value - zero point) * scale.

    Outputs come before inputs, so that tensor cores read K-major operands.

    Attributes:
        values: [W, X, E], float8_e4m3fn, int8 or int4.
        scale: [W, X] per channel, or [W, X / rows, E / inputs] per block of (rows, inputs).
        zero_points: int8, of the scale's shape, or None.
        interleaved: whether int4 values are in the order of ``interleaving``.
        is_early: whether kernels may read it before those that they depend on have ended, because
            no kernel of the program writes it.
    """

    values: Num[Array, "W X E"]
    scale: Float[Array, "W ..."]
    zero_points: Num[Array, "W ..."] | None = None
    interleaved: bool = dataclasses.field(default=False, metadata={"static": True})
    is_early: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of_leaves(
        cls,
        leaves: Mapping[str, Array],
        columns: tuple[int, ...],
        matrices: int,
        *,
        interleaved: bool,
        is_early: bool = False,
    ) -> "ScaledWeight":
        """The leaves of a projection; ``columns`` is the shape of its result after T."""

        def flat(leaf: Array) -> Array:
            outputs = math.prod(leaf.shape[: len(columns)])
            inputs = (-1,) if leaf.ndim > len(columns) else ()
            return leaf.reshape(matrices, outputs // matrices, *inputs)

        zero_points = leaves.get("weight_zero_point")
        return cls(
            flat(leaves["weight"]),
            flat(leaves["weight_scale"]),
            None if zero_points is None else flat(zero_points),
            interleaved=interleaved,
            is_early=is_early,
        )

    @property
    def block(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale."""
        _, X, E = self.values.shape
        if self.scale.ndim == 2:
            return X // self.scale.shape[1], E
        return X // self.scale.shape[1], E // self.scale.shape[2]

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.values.dtype == jnp.int4 else 8

    @property
    def is_fp8(self) -> bool:
        """Whether the values are float8_e4m3fn."""
        return self.values.dtype == jnp.float8_e4m3fn

    def can_split(self, parts: int, multiple: int) -> bool:
        """Whether a single matrix has ``parts`` of a multiple of outputs and whole scales."""
        W, X, _ = self.values.shape
        return W == 1 and X % (parts * multiple) == 0 and self.scale.shape[1] % parts == 0

    def split(self, matrices: int) -> "ScaledWeight":
        """A single matrix as several, one for each part of its outputs; several as they are."""

        def parts(leaf: Array) -> Array:
            return leaf.reshape(matrices, -1, *leaf.shape[2:])

        leaves = (self.values, self.scale, self.zero_points)
        values, scale, zero_points = jax.tree.map(parts, leaves)
        return dataclasses.replace(self, values=values, scale=scale, zero_points=zero_points)

    def dequantise(self) -> Float[Array, "W X E"]:
        """The weight in float32."""

        def repeated(blocks: Array) -> Array:
            blocks = blocks.astype(jnp.float32).reshape(*blocks.shape, *(1,) * (3 - blocks.ndim))
            for axis, size in enumerate(self.values.shape):
                blocks = jnp.repeat(blocks, size // blocks.shape[axis], axis)
            return blocks

        value = natural(self.values) if self.interleaved else self.values
        value = value.astype(jnp.float32)
        if self.zero_points is not None:
            value = value - repeated(self.zero_points)
        return value * repeated(self.scale)
