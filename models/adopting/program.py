"""The program that makes the new arrays of a parameter in place of the old ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from rjax.models.adopting.reading import Reading
from rjax.models.loading.assembly import Assembly, constrained
from rjax.models.loading.pieces import View


@dataclasses.dataclass(frozen=True, slots=True)
class KeptPart:
    """The part of a parameter that a tensor fills which an update lacks.

    Attributes:
        axis: the fused axis.
        start, count: the entries of the axis.
        view: makes the part of the tensor.
    """

    axis: int
    start: int
    count: int
    view: View

    def tensor(self, parameter: Array) -> Array:
        """The tensor, with its axes unmerged; traced."""
        stop = self.start + self.count
        return self.view.inverse(jax.lax.slice_in_dim(parameter, self.start, stop, axis=self.axis))


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Rows of a tensor.

    Attributes:
        reading: how the tensor is read from its array; None for the array itself.
        first_row, rows: the rows; None for all.
    """

    reading: Reading | None
    first_row: int = 0
    rows: int | None = None

    def read(self, array: Any, index: Any) -> Any:
        """The rows, of an array on the host or traced."""
        tensor = array if self.reading is None else self.reading(array, index)
        return tensor if self.rows is None else tensor[self.first_row : self.first_row + self.rows]


type BlockSource = tuple[Part, ...] | KeptPart | None
"""The parts of a block that follow each other; None for one that is made before."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptProgram:
    """Makes the arrays of a weight from those of a trainer; equal weights share one.

    Attributes:
        sources: where each block comes from.
        blocks: shape, dtype and sharding of each block.
        assembly: makes the arrays of the blocks; None if the only block is the parameter.
        results: shape, dtype and sharding of the arrays.
    """

    sources: tuple[BlockSource, ...]
    blocks: tuple[jax.ShapeDtypeStruct, ...]
    assembly: Assembly | None
    results: tuple[jax.ShapeDtypeStruct, ...]

    def compile(
        self, arrays: Sequence[jax.ShapeDtypeStruct], old: Sequence[jax.Array]
    ) -> jax.stages.Compiled:
        """The compiled program: a function of the arguments of `trace` that donates ``old``.

        Args:
            arrays: shape, dtype and sharding of the trainer's arrays.
            old: the arrays that are replaced.
        """
        shardings = tuple(leaf.sharding for leaf in old)
        run = jax.jit(self.trace, donate_argnums=2, keep_unused=True, out_shardings=shardings)
        indices = np.zeros((len(arrays), 2), np.int32)
        return run.lower(tuple(arrays), indices, tuple(old)).compile()

    def trace(
        self,
        arrays: tuple[Array, ...],
        indices: Int32[Array | np.ndarray, "X 2"],
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """The new arrays; traced.

        Args:
            arrays: the arrays of the parts of each block, or the block.
            indices: the entries that are read of each array of all layers or experts.
            old: the arrays that are replaced.
        """
        at = 0
        made: list[Array] = []
        for source, block in zip(self.sources, self.blocks, strict=True):
            if isinstance(source, KeptPart):
                made.append(source.tensor(old[0]).reshape(block.shape))
                continue
            if source is None:
                made.append(arrays[at])
                at += 1
                continue
            parts = []
            for part in source:
                parts.append(part.read(arrays[at], indices[at]))
                at += 1
            whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            made.append(whole.astype(block.dtype).reshape(block.shape))
        if self.assembly is None:
            return (jnp.copy(made[0]),)
        split = iter(
            constrained(array, block.sharding)
            for array, block in zip(made, self.blocks, strict=True)
        )
        return self.assembly.trace(
            tuple(tuple(next(split) for _ in blocks) for blocks in self.assembly.blocks)
        )
