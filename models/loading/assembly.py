"""The programs that make parameters of the blocks on the devices."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rjax.models.loading.array_program import ArrayProgram
from rjax.models.loading.layout import View


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly(ArrayProgram):
    """Makes a parameter: pieces unmerged, transposed, cast and concatenated along the fused axis.

    Parameters with equal assemblies, such as those of different layers, share a program. If each
    expert has its own pieces, they are stacked along the first axis.

    Attributes:
        blocks: shape, dtype and sharding of the blocks of each piece. A piece is one block, or
            several of the shape (shards, rows, ...) to be joined along ``rows``.
        piece_shardings: of each whole piece.
        views: of each piece, or of each piece of one expert.
        axis: the fused axis of the parameter; None with a single piece of it or of an expert.
        stacked: whether each expert has its own pieces.
        dtype: of the parameter.
        sharding: of the parameter.
        offset: added to the values, in the parameter's dtype.
    """

    blocks: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    piece_shardings: tuple[NamedSharding, ...]
    views: tuple[View, ...]
    axis: int | None
    stacked: bool
    dtype: np.dtype
    sharding: NamedSharding
    offset: float = 0.0

    def compile(self) -> None:
        """See the base class."""
        _assemble.lower(self.blocks, self).compile()

    def __call__(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        remaining = iter(arrays)
        pieces = [tuple(itertools.islice(remaining, len(blocks))) for blocks in self.blocks]
        return (_assemble(tuple(pieces), self),)


@functools.partial(jax.jit, static_argnames=("assembly",))
def _assemble(pieces: tuple[tuple[jax.Array, ...], ...], assembly: Assembly) -> jax.Array:
    joined = [
        join_blocks(blocks, sharding)
        for blocks, sharding in zip(pieces, assembly.piece_shardings, strict=True)
    ]
    if assembly.stacked:
        each = len(assembly.views)
        joined = [jnp.stack(joined[i::each]) for i in range(each)]
    parts = [
        part.reshape(shape).transpose(order).astype(assembly.dtype)
        for part, (shape, order) in zip(joined, assembly.views, strict=True)
    ]
    whole = parts[0] if assembly.axis is None else jnp.concatenate(parts, assembly.axis)
    whole = whole + assembly.offset if assembly.offset else whole
    return jax.lax.with_sharding_constraint(whole, assembly.sharding)


def join_blocks(blocks: tuple[jax.Array, ...], sharding: NamedSharding) -> jax.Array:
    """A tensor from its blocks, as `split_rows` cuts it; traced."""
    if len(blocks) == 1:
        return blocks[0]
    joined = jnp.concatenate(blocks, 1)
    return jax.lax.with_sharding_constraint(joined.reshape(-1, *joined.shape[2:]), sharding)
