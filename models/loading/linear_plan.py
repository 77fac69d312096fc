"""Loading the arrays of a quantised `Linear`."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.config import ModelConfig
from rjax.models.formats.weight_format import StoredTensor, Target, WeightFormat
from rjax.models.layers.linear import Linear
from rjax.models.loading.array_program import ArrayProgram, BlockArrays, Blocks
from rjax.models.loading.assembly import join_blocks
from rjax.models.loading.blocks import split_rows
from rjax.models.loading.layout import (
    View,
    copied_axis,
    groups,
    piece_shape,
    piece_sharding,
    piece_sizes,
    tensor_shape,
)
from rjax.models.loading.linear_modules import module_of
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.schemes import Leaf, WeightScheme
from rjax.models.sharding import parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPiece:
    """A part of a fused weight, as it is stored.

    Attributes:
        roles: roles of its stored tensors, in order.
        tensors: indices of these tensors among those that are loaded.
        shape: (outputs, inputs) of the weight that is stored, of which the piece may be some rows.
        first_row, rows: first row and number of rows of the piece in that weight.
        views: view of each leaf, in order.
    """

    roles: tuple[str, ...]
    tensors: tuple[int, ...]
    shape: tuple[int, int]
    first_row: int
    rows: int
    views: tuple[View, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLeaf:
    """An array of a `Linear`.

    Attributes:
        name: name of the leaf.
        block: (outputs, inputs) that share an entry.
        axis: the fused axis; None with a single piece.
        sharding: sharding of the array.
    """

    name: str
    block: tuple[int, int]
    axis: int | None
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAssembly(ArrayProgram):
    """Makes all arrays of a `Linear` from stored tensors.

    Layers with equal assemblies share a program.

    Attributes:
        format: weight format of the stored tensors.
        scheme: weight scheme of the arrays.
        blocks: shape, dtype and sharding of the blocks of each tensor.
        tensor_shardings: sharding of each whole tensor.
        pieces: pieces that the tensors belong to, in order.
        leaves: the arrays.
    """

    format: WeightFormat
    scheme: WeightScheme
    blocks: Blocks
    tensor_shardings: tuple[NamedSharding, ...]
    pieces: tuple[StoredPiece, ...]
    leaves: tuple[PlannedLeaf, ...]

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """See the base class."""
        return tuple(leaf.sharding for leaf in self.leaves)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array, ...]:
        """See the base class; the leaves in order."""
        joined = list(map(join_blocks, tensors, self.tensor_shardings))
        blocks = {leaf.name: leaf.block for leaf in self.leaves}
        parts: dict[str, list[jax.Array]] = {leaf.name: [] for leaf in self.leaves}
        for piece in self.pieces:
            stored = {role: joined[i] for role, i in zip(piece.roles, piece.tensors, strict=True)}
            decoded = self.format.decode(stored, Target(self.scheme, piece.shape, blocks))
            for leaf, view in zip(self.leaves, piece.views, strict=True):
                rows = leaf.block[0]
                start, stop = piece.first_row // rows, (piece.first_row + piece.rows) // rows
                part = jax.lax.slice_in_dim(decoded[leaf.name], start, stop)
                parts[leaf.name].append(view(part))
        fused = {
            leaf.name: found[0] if leaf.axis is None else jnp.concatenate(found, leaf.axis)
            for leaf, found in ((leaf, parts[leaf.name]) for leaf in self.leaves)
        }
        stored = self.scheme.arrange(fused)
        return tuple(
            jax.lax.with_sharding_constraint(stored[leaf.name], leaf.sharding)
            for leaf in self.leaves
        )


def stored_tensors(
    config: ModelConfig, pieces: tuple[Piece, ...]
) -> dict[str, dict[str, StoredTensor]]:
    """The tensors by role of each module of a quantised weight."""
    assert config.format is not None
    tensors = {}
    for piece in pieces:
        outputs, inputs = tensor_shape(piece, config)
        module = module_of(piece)
        tensors[module] = dict(config.format.tensors(module, (outputs, inputs)))
    return tensors


def linear_plan(
    linear: Linear,
    pieces: tuple[Piece, ...],
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the arrays of a quantised `Linear` are loaded, in the order of its leaves."""
    assert config.format is not None
    leaves = linear.scheme.leaves(linear.inputs, linear.outputs, config.axis_sizes)
    stored = stored_tensors(config, pieces)
    planned, shardings, split = [], [], []
    numbers: dict[str, int] = {}  # of tensors, of which each is read once
    for piece in pieces:
        outputs, inputs = tensor_shape(piece, config)
        used = {role: tensor for role, tensor in stored[module_of(piece)].items() if tensor.used}
        for tensor in used.values():
            if tensor.name in numbers:
                continue
            numbers[tensor.name] = len(numbers)
            entry = entries[tensor.name]
            shape = entry.shape or (1,)
            sharding = tensor_sharding(tensor, shape, piece, config, mesh)
            dtype = entry.file_dtype()
            shardings.append(sharding)
            split.append(split_rows(entry, dtype, 0, shape, sharding, block_bytes))
        planned.append(
            StoredPiece(
                roles=tuple(used),
                tensors=tuple(numbers[tensor.name] for tensor in used.values()),
                shape=(outputs, inputs),
                first_row=piece.first_row,
                rows=piece_shape(piece, config)[0],
                views=tuple(leaf_view(piece, leaf, config) for leaf in leaves.values()),
            )
        )
    assembly = LinearAssembly(
        format=config.format,
        scheme=linear.scheme,
        blocks=tuple(tuple(block.abstract for block in part) for part in split),
        tensor_shardings=tuple(shardings),
        pieces=tuple(planned),
        leaves=tuple(
            _planned_leaf(linear, name, leaf, len(pieces), mesh) for name, leaf in leaves.items()
        ),
    )
    return ParameterPlan(tuple(itertools.chain(*split)), assembly)


def _planned_leaf(linear: Linear, name: str, leaf: Leaf, pieces: int, mesh: Mesh) -> PlannedLeaf:
    abstract = getattr(linear, name).get_value()
    shared = dict(leaf.blocks)
    outputs, inputs = (
        math.prod(shared.get(letter, 1) for letter in letters.split())
        for letters in (linear.outputs, linear.inputs)
    )
    return PlannedLeaf(
        name=name,
        block=(outputs, inputs),
        axis=leaf.letters.split().index("A") if pieces > 1 else None,
        sharding=parameter_sharding(leaf.letters, abstract.shape, mesh),
    )


def leaf_view(piece: Piece, leaf: Leaf, config: ModelConfig) -> View:
    """The view of a piece's part of a leaf.

    Pieces of single experts are stacked before.
    """
    sizes = piece_sizes(piece, config)
    shared = dict(leaf.blocks)
    letters = leaf.letters.split()
    flat = [letter for group in groups(piece) for letter in group if letter in letters]
    flat = ["J", *flat] if piece.of_expert else flat
    order = tuple(flat.index(letter) for letter in letters)
    shape = tuple(sizes[letter] // shared.get(letter, 1) for letter in flat)
    return View(shape, order, copied_axis(piece, leaf.letters))


def tensor_sharding(
    tensor: StoredTensor,
    shape: tuple[int, ...],
    piece: Piece,
    config: ModelConfig,
    mesh: Mesh,
) -> NamedSharding:
    """The parameter's sharding on each axis that it divides; devices get the other axes whole."""
    of_piece = piece_sharding(piece, config, mesh)
    outputs, inputs = (*of_piece.spec, None, None)[:2]
    of_axes = {"outputs": outputs if piece.rows is None else None, "inputs": inputs, None: None}
    spec = [
        None
        if of_axes[axis] is None or size % of_piece.mesh.shape[of_axes[axis]]
        else of_axes[axis]
        for axis, size in zip(tensor.axes, shape, strict=True)
    ]
    return of_piece.update(spec=PartitionSpec(*spec))
