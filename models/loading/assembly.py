"""The programs that make parameters of the blocks on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rjax.models.loading.array_program import ArrayProgram, BlockArrays, Blocks
from rjax.models.loading.layout import View


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly(ArrayProgram):
    """Makes a parameter: pieces unmerged, transposed, cast and concatenated along the fused axis.

    Parameters with equal assemblies, such as those of different layers, share a program. If each
    expert has its own pieces, they are stacked along the first axis. If devices hold whole experts,
    a piece has one expert of each device, and the pieces are stacked along the second axis.

    Attributes:
        blocks: shape, dtype and sharding of the blocks of each piece. A piece is one block, or
            several of the shape (shards, rows, ...) to be joined along ``rows``.
        piece_shardings: sharding of each whole piece.
        views: view of each piece, or of each piece of one expert.
        axis: the fused axis of the parameter; None with a single piece of it or of an expert.
        stacked: the axis along which pieces of experts are stacked; None for others.
        dtype: dtype of the parameter.
        sharding: sharding of the parameter.
        offset: added to the values, in the parameter's dtype.
    """

    blocks: Blocks
    piece_shardings: tuple[NamedSharding, ...]
    views: tuple[View, ...]
    axis: int | None
    stacked: int | None
    dtype: np.dtype
    sharding: NamedSharding
    offset: float = 0.0

    @property
    def shardings(self) -> tuple[NamedSharding]:
        """See the base class; one parameter."""
        return (self.sharding,)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        join = join_stacked if self.stacked == 1 else join_blocks
        joined = [
            join(blocks, sharding)
            for blocks, sharding in zip(tensors, self.piece_shardings, strict=True)
        ]
        if self.stacked is not None:
            each = len(self.views)
            joined = [jnp.stack(joined[i::each], self.stacked) for i in range(each)]
        parts = [
            view(part).astype(self.dtype) for part, view in zip(joined, self.views, strict=True)
        ]
        whole = parts[0] if self.axis is None else jnp.concatenate(parts, self.axis)
        whole = whole + self.offset if self.offset else whole
        return (jax.lax.with_sharding_constraint(whole, self.sharding),)


def join_blocks(blocks: tuple[jax.Array, ...], sharding: NamedSharding) -> jax.Array:
    """A tensor from its blocks, as `split_rows` cuts it; traced."""
    if len(blocks) == 1:
        return blocks[0]
    joined = jnp.concatenate(blocks, 1)
    return jax.lax.with_sharding_constraint(joined.reshape(-1, *joined.shape[2:]), sharding)


def join_stacked(blocks: tuple[jax.Array, ...], sharding: NamedSharding) -> jax.Array:
    """Tensors from their blocks, as `stack_tensors` cuts them; traced."""
    joined = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1)
    return jax.lax.with_sharding_constraint(joined, sharding)
