"""The program that makes parameters of the tensors of a checkpoint."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rjax.models.formats.weight_format import Target, WeightFormat
from rjax.models.loading.pieces import View
from rjax.models.schemes import WeightScheme
from rjax.models.sharding import TENSOR_AXIS

type Blocks = tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
"""Shape, dtype and sharding of the blocks of each tensor."""

type BlockArrays = tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a fused weight, as it is stored.

    Attributes:
        roles: roles of its stored tensors, in order.
        tensors: indices of these tensors among those that are loaded, or among those of an expert.
        shape: (outputs, inputs) of the weight that is decoded, of which the piece may be some rows.
        rows: first row and number of rows of the piece in that weight; None for all.
        outputs_first: converts a weight of floats to the order (experts, outputs, inputs); None if
            it has that order.
        views: view of each leaf, in order.
    """

    roles: tuple[str, ...]
    tensors: tuple[int, ...]
    shape: tuple[int, int]
    rows: tuple[int, int] | None
    outputs_first: View | None
    views: tuple[View, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """An array of a scheme.

    Attributes:
        name: name of the leaf.
        dtype: dtype of the array.
        block: (outputs, inputs) of the weight that share an entry.
        axis: the fused axis, before the leaf is arranged; None with a single piece.
        sharding: sharding of the array.
    """

    name: str
    dtype: np.dtype
    block: tuple[int, int]
    axis: int | None
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class Dequantised:
    """A weight that is made of the arrays of its scheme.

    Attributes:
        depth: number of inputs.
        view: converts the weight, inputs before outputs, to the axes of the parameter.
        dtype, sharding: dtype and sharding of the parameter.
    """

    depth: int
    view: View
    dtype: np.dtype
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """An array that a program makes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class Assembly:
    """Makes the arrays of a scheme, or the dequantised weight, of stored tensors.

    Tensors are decoded, unmerged, transposed and concatenated along the fused axis. Parameters with
    equal assemblies, such as those of different layers, are compiled once.

    Attributes:
        format: weight format of the stored tensors.
        scheme: weight scheme of the arrays.
        blocks: shape, dtype and sharding of the blocks of each tensor. A tensor is one block, or
            several of the shape (shards, rows, ...) to be joined along ``rows``.
        tensor_shardings: sharding of each whole tensor.
        pieces: pieces that the tensors belong to, in order; the same for each expert, if it has its
            own tensors.
        leaves: the arrays.
        of_experts: the arrays have all experts of a layer, along their first axis.
        stacks: each expert has its own tensors, which are stacked.
        parallel: devices hold whole experts, and each makes the arrays of its own.
        dequantised: the weight, if it is dequantised.
    """

    format: WeightFormat
    scheme: WeightScheme
    blocks: Blocks
    tensor_shardings: tuple[NamedSharding, ...]
    pieces: tuple[StoredPiece, ...]
    leaves: tuple[PlannedLeaf, ...]
    of_experts: bool
    stacks: bool
    parallel: bool
    dequantised: Dequantised | None

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Shardings of the parameters, in order."""
        if self.dequantised is not None:
            return (self.dequantised.sharding,)
        return tuple(leaf.sharding for leaf in self.leaves)

    @property
    def results(self) -> tuple[Result, ...]:
        """Shape, dtype and sharding of each parameter, in order."""
        found = jax.eval_shape(self.trace, self.blocks)
        return tuple(
            Result(array.shape, np.dtype(array.dtype), sharding)
            for array, sharding in zip(found, self.shardings, strict=True)
        )

    def compile(self, memory: tuple[jax.Array, ...] = ()) -> None:
        """Compile the program, so that calls with such ``memory`` find it."""
        abstract = tuple(
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for array in memory
        )
        _run.lower(self.blocks, abstract, self).compile()

    def __call__(
        self, arrays: Sequence[jax.Array], memory: tuple[jax.Array, ...] = ()
    ) -> tuple[jax.Array, ...]:
        """The parameters from the arrays of all blocks in order, dispatched asynchronously.

        Args:
            arrays: the device arrays of the blocks, in order.
            memory: device memory from `reserve`, which the results take; empty for new memory.
        """
        remaining = iter(arrays)
        tensors = [tuple(itertools.islice(remaining, len(blocks))) for blocks in self.blocks]
        return _run(tuple(tensors), memory, self)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array, ...]:
        """The leaves in order, or the weight, from the blocks of each tensor; traced."""
        if not self.parallel:
            made = self._made(list(map(_join_blocks, tensors, self.tensor_shardings)))
            return tuple(map(constrained, made, self.shardings))
        spec = PartitionSpec(TENSOR_AXIS)
        own = jax.shard_map(
            self._made_by_device,
            mesh=self.shardings[0].mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return own(tensors)

    def _made_by_device(self, tensors: BlockArrays) -> tuple[jax.Array, ...]:
        """What one device makes of its blocks."""
        joined = [
            blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, 1) for blocks in tensors
        ]
        # Blocks (tensors, rows, ...) have one tensor of a device: an expert's, or its share of all.
        several = [self.stacks or len(blocks) > 1 for blocks in tensors]
        return self._made(
            [array[0] if first else array for array, first in zip(joined, several, strict=True)]
        )

    def _made(self, tensors: list[jax.Array]) -> tuple[jax.Array, ...]:
        """The leaves in order, or the weight, from whole tensors."""
        if self.stacks:
            each = 1 + max(itertools.chain(*(piece.tensors for piece in self.pieces)))
            tensors = [jnp.stack(tensors[i::each]) for i in range(each)]
        decoded = [self._decoded(piece, tensors) for piece in self.pieces]
        plain = {
            leaf.name: parts[0] if leaf.axis is None else jnp.concatenate(parts, leaf.axis)
            for leaf, *parts in zip(self.leaves, *decoded, strict=True)
        }
        if self.dequantised is None:
            each = jax.vmap(self.scheme.for_experts.arrange)
            arranged = (each if self.of_experts else self.scheme.arrange)(plain)
            return tuple(arranged[leaf.name] for leaf in self.leaves)
        if not self.parallel:
            plain = {
                leaf.name: constrained(plain[leaf.name], leaf.sharding) for leaf in self.leaves
            }
        depth, dtype = self.dequantised.depth, self.dequantised.dtype

        def weight(leaves: Mapping[str, jax.Array]) -> jax.Array:
            return self.scheme.dequantise_plain(leaves, depth, dtype)

        return (self.dequantised.view((jax.vmap(weight) if self.of_experts else weight)(plain)),)

    def _decoded(self, piece: StoredPiece, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """The part of each leaf that a piece fills."""
        stored = {role: tensors[i] for role, i in zip(piece.roles, piece.tensors, strict=True)}
        if piece.outputs_first is not None:
            stored = {"weight": piece.outputs_first(stored["weight"])}
        blocks = {leaf.name: leaf.block for leaf in self.leaves}
        decode = self.format.decode_experts if self.of_experts else self.format.decode
        decoded = decode(stored, Target(self.scheme, piece.shape, blocks))
        parts = []
        for leaf, of_leaf in zip(self.leaves, piece.views, strict=True):
            part = decoded[leaf.name]
            if piece.rows is not None:
                first, count = piece.rows
                rows = leaf.block[0]
                part = jax.lax.slice_in_dim(part, first // rows, (first + count) // rows)
            parts.append(of_leaf(part.astype(leaf.dtype)))
        return parts


def _join_blocks(blocks: tuple[jax.Array, ...], sharding: NamedSharding) -> jax.Array:
    """A tensor from its blocks, as `split_rows` cuts it; traced."""
    if len(blocks) == 1:
        return blocks[0]
    joined = jnp.concatenate(blocks, 1)
    return constrained(joined.reshape(-1, *joined.shape[2:]), sharding)


def constrained(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array with a sharding; traced. On one device it stays where it is, so that a program
    over other devices may make it."""
    if sharding.mesh.size == 1:
        return array
    return jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(
    jax.jit, static_argnames=("program",), donate_argnames=("memory",), keep_unused=True
)
def _run(
    tensors: BlockArrays, memory: tuple[jax.Array, ...], program: Assembly
) -> tuple[jax.Array, ...]:
    del memory
    return program.trace(tensors)


def reserve(programs: Sequence[Assembly]) -> list[tuple[jax.Array, ...]]:
    """Device memory for the results of each program: arrays that its call donates."""
    of_program = {program: program.results for program in programs}
    flat = iter(_zeros(tuple(itertools.chain(*(of_program[program] for program in programs)))))
    return [tuple(itertools.islice(flat, len(of_program[program]))) for program in programs]


@functools.partial(jax.jit, static_argnames=("results",))
def _zeros(results: tuple[Result, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        jax.lax.with_sharding_constraint(jnp.zeros(result.shape, result.dtype), result.sharding)
        for result in results
    )
