"""Attention results that are not merged yet."""

import dataclasses
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Float32, Int


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class UnmergedAttention:
    """Partial attention results with their LSE; the kernel that reads them merges them.

    Attributes:
        out: results of the rows with one partial result; the other rows hold stale data.
        partial_out, partial_lse: the X partial results of the other rows.
        merge_indptr: row t merges entries merge_indptr[t] to merge_indptr[t + 1] of
            ``partial_out``; the result of a row with one entry is in ``out``.
    """

    out: Float[Array, "T N H"]
    partial_out: Float[Array, "X N H"]
    partial_lse: Float32[Array, "X N"]
    merge_indptr: Int[Array, " T1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the merged result."""
        return self.out.shape

    def __len__(self) -> int:
        """Rows, T."""
        return self.out.shape[0]

    def first_dims(self, dims: int) -> "UnmergedAttention":
        """The results without the dims of H from ``dims`` on."""
        out, partial_out = self.out[:, :, :dims], self.partial_out[:, :, :dims]
        return dataclasses.replace(self, out=out, partial_out=partial_out)
