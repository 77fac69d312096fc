"""Attention results that are not merged yet."""

import dataclasses
from typing import no_type_check

import jax
from jaxtyping import Array, Float, Float32, Int


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class UnmergedAttention:
    """Partial attention results with their LSE; the kernel that reads them merges them.

    Attributes:
        out: rows with one partial result lie here; the others hold stale data.
        part, part_lse: the X partial results of the other rows.
        merge_indptr: row t merges entries merge_indptr[t] to merge_indptr[t + 1] of ``part``; a row
            with one entry has it in ``out``.
    """

    out: Float[Array, "T N H"]
    part: Float[Array, "X N H"]
    part_lse: Float32[Array, "X N"]
    merge_indptr: Int[Array, " T1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the merged result."""
        return self.out.shape

    def __len__(self) -> int:
        """Rows, T."""
        return self.out.shape[0]
