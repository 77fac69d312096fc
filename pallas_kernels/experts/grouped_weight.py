"""The operand of a grouped GEMM that is stored in few bits."""

import dataclasses
from collections.abc import Mapping
from typing import no_type_check

import jax
from jaxtyping import Array, Num


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W matrices of each of J experts: weight = value * scale.

    Attributes:
        values: [J, W, E, D], outputs before inputs; float8_e4m3fn, int8 or int4. All but int8 are
            interleaved along the inputs (``few_bits.interleaving``).
        scale: [J, W, E] per channel, or [J, D / inputs, W, E / outputs] per block.
        kind: what the values are; with mxfp4, int4 holds the bits of float4_e2m1fn and the scale is
            the exponent of float8_e8m0fnu, at most 128.
    """

    values: Num[Array, "J W E D"]
    scale: Num[Array, "J ..."]
    kind: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(J, D, W, E)."""
        J, W, E, D = self.values.shape
        return J, D, W, E

    @property
    def block(self) -> tuple[int, int] | None:
        """(outputs, inputs) that share a scale; None for channels."""
        if self.scale.ndim == 3:
            return None
        _, D, _, E = self.shape
        return E // self.scale.shape[3], D // self.scale.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.kind in ("int4", "mxfp4") else 8

    @property
    def promoted(self) -> bool:
        """Whether products of a block of inputs are scaled, in float32, and not weights."""
        return self.block is not None and self.block[0] > 1

    def can_split(self, parts: int, multiple: int) -> bool:
        """Whether a single matrix has ``parts`` of a multiple of outputs and whole scales."""
        _, _, W, E = self.shape
        return W == 1 and E % (parts * multiple) == 0 and self.scale.shape[-1] % parts == 0

    def split(self, parts: int) -> "GroupedWeight":
        """A single matrix as several, one for each part of its outputs."""
        J, D, _, E = self.shape
        scale = self.scale.reshape(*self.scale.shape[:-2], parts, -1)
        values = self.values.reshape(J, parts, E // parts, D)
        return dataclasses.replace(self, values=values, scale=scale)


def grouped_weight(kind: str, leaves: Mapping[str, Array], matrices: int) -> GroupedWeight:
    """The operand of the leaves of experts with ``matrices`` matrices of values ``kind``."""
    values, scale = leaves["weight"], leaves["weight_scale"]
    J, depth = values.shape[0], values.shape[-1]
    of_depth = scale.shape[1:2] if scale.ndim == values.ndim else ()
    return GroupedWeight(
        values.reshape(J, matrices, -1, depth),
        scale.reshape(J, *of_depth, matrices, -1),
        kind=kind,
    )
