"""Loading the quantised weights of all experts of a layer."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.formats import OnLoad
from rjax.models.formats.weight_format import FLOATS, StoredTensor, Target, WeightFormat
from rjax.models.layers.grouped_linear import GroupedLinear
from rjax.models.loading.array_program import ArrayProgram, BlockArrays, Blocks
from rjax.models.loading.assembly import join_blocks
from rjax.models.loading.blocks import Block, split_rows, stack_tensors
from rjax.models.loading.expert_groups import common_dtype, experts_of_devices
from rjax.models.loading.layout import (
    View,
    groups,
    piece_sharding,
    read_shape,
    tensor_shape,
    view,
)
from rjax.models.loading.linear_modules import module_of
from rjax.models.loading.linear_plan import leaf_view, tensor_sharding
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.schemes import Leaf, Scaled, WeightScheme
from rjax.models.schemes.grouped import arrange_grouped, plain_leaves
from rjax.models.schemes.scaled import VALUE_DTYPES
from rjax.models.sharding import TENSOR_AXIS, parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class StoredProjection:
    """A projection of all experts, as it is stored.

    Attributes:
        roles: roles of its stored tensors, in order.
        shape: (outputs, inputs) of the weight of an expert.
        view: converts a plain weight of all experts to (experts, outputs, inputs); None for others.
        views: view of each leaf, in order.
    """

    roles: tuple[str, ...]
    shape: tuple[int, int]
    view: View | None
    views: tuple[View, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedArray:
    """An array of a `GroupedLinear`.

    Attributes:
        name: name of the leaf.
        block: (outputs, inputs) that share an entry.
        axis: the fused axis, before the leaf is arranged; None with a single projection.
        sharding: sharding of the array.
    """

    name: str
    block: tuple[int, int]
    axis: int | None
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertAssembly(ArrayProgram):
    """Makes all arrays of a `GroupedLinear` from stored tensors, one expert after another.

    Layers with equal assemblies share a program.

    Attributes:
        format: weight format of the stored tensors.
        scheme: weight scheme of the arrays.
        blocks: shape, dtype and sharding of the blocks of each tensor.
        tensor_shardings: sharding of each whole tensor.
        projections: projections that the tensors belong to, in order; the same for each expert, if
            it has its own tensors.
        of_experts: whether each expert has its own tensors.
        parallel: devices hold whole experts, and each makes the arrays of its own.
        arrays: what is made.
        dequantised: the dtype and the sharding of the weight, if it is dequantised.
    """

    format: WeightFormat
    scheme: Scaled
    blocks: Blocks
    tensor_shardings: tuple[NamedSharding, ...]
    projections: tuple[StoredProjection, ...]
    of_experts: bool
    parallel: bool
    arrays: tuple[PlannedArray, ...]
    dequantised: tuple[np.dtype, NamedSharding] | None

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """See the base class."""
        if self.dequantised is not None:
            return (self.dequantised[1],)
        return tuple(array.sharding for array in self.arrays)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array, ...]:
        """See the base class; the leaves in order, or the weight."""
        if not self.parallel:
            made = self._made(list(map(join_blocks, tensors, self.tensor_shardings)))
            return tuple(map(jax.lax.with_sharding_constraint, made, self.shardings))
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
        several = [self.of_experts or len(blocks) > 1 for blocks in tensors]
        return self._made(
            [array[0] if first else array for array, first in zip(joined, several, strict=True)]
        )

    def _made(self, joined: list[jax.Array]) -> tuple[jax.Array, ...]:
        """The leaves in order, or the weight, from whole tensors."""
        if self.of_experts:
            each = sum(len(projection.roles) for projection in self.projections)
            joined = [jnp.stack(joined[i::each]) for i in range(each)]
        remaining = iter(joined)
        blocks = {array.name: array.block for array in self.arrays}
        parts: dict[str, list[jax.Array]] = {array.name: [] for array in self.arrays}
        for projection in self.projections:
            stored = {role: next(remaining) for role in projection.roles}
            target = Target(self.scheme, projection.shape, blocks)
            decoded = _decoded(stored, projection, target, self)
            for array, of_leaf in zip(self.arrays, projection.views, strict=True):
                parts[array.name].append(of_leaf(decoded[array.name]))
        plain = {
            array.name: parts[array.name][0]
            if array.axis is None
            else jnp.concatenate(parts[array.name], array.axis)
            for array in self.arrays
        }
        if self.dequantised is not None:
            dtype, _ = self.dequantised
            return (jnp.moveaxis(self.scheme.widened(plain).astype(dtype), -1, 1),)
        arranged = arrange_grouped(self.scheme, plain)
        return tuple(arranged[array.name] for array in self.arrays)


def _decoded(
    stored: Mapping[str, jax.Array],
    projection: StoredProjection,
    target: Target,
    assembly: ExpertAssembly,
) -> dict[str, jax.Array]:
    """The arrays of the scheme with the experts first."""
    weight_format = assembly.format
    if not assembly.of_experts and projection.view is None:
        return weight_format.decode_experts(stored, target)
    if projection.view is not None:
        plain = projection.view(stored["weight"])
        stored = {"weight": plain.reshape(len(plain), *target.shape)}

    def expert(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        decoded = weight_format.decode(own, target)
        # A loop stores bytes, not half bytes.
        return {
            name: leaf.astype(jnp.int8) if leaf.dtype == jnp.int4 else leaf
            for name, leaf in decoded.items()
        }

    found = jax.lax.map(expert, stored)
    half_bytes = VALUE_DTYPES[assembly.scheme.values] == jnp.int4
    return found | ({"weight": found["weight"].astype(jnp.int4)} if half_bytes else {})


def stored_experts(
    config: ModelConfig, pieces: tuple[Piece, ...]
) -> list[Mapping[str, StoredTensor]]:
    """The tensors by role of each piece of a weight of experts.

    Raises:
        CheckpointError: the format cannot store all experts in one tensor.
    """
    assert config.format is not None
    return [_stored(config, config.format, piece) for piece in pieces]


def _stored(
    config: ModelConfig, weight_format: WeightFormat, piece: Piece
) -> Mapping[str, StoredTensor]:
    if piece.of_expert:
        outputs, inputs = tensor_shape(piece, config)
        return weight_format.tensors(module_of(piece), (outputs, inputs))
    if isinstance(weight_format, OnLoad):
        shape = tensor_shape(piece, config)
        return {"weight": StoredTensor(piece.tensor, (shape,), FLOATS, (None,) * len(shape))}
    J, outputs, inputs = tensor_shape(_outputs_first(piece), config)
    tensors = weight_format.expert_tensors(piece.tensor, (J, outputs, inputs))
    if tensors is None:
        raise CheckpointError(
            f"{piece.tensor} holds all experts of a layer, which checkpoints of the quant_method "
            f"{config.quant_method!r} cannot store in one tensor"
        )
    return tensors


def expert_plan(
    grouped: GroupedLinear,
    pieces: tuple[Piece, ...],
    scheme: WeightScheme,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the weights of all experts of a layer are loaded that are stored in a scheme.

    They are dequantised to ``dtype`` if the module's own scheme is another; else the plan makes the
    leaves of the module in order.
    """
    weight_format = config.format
    assert weight_format is not None and isinstance(scheme, Scaled)
    of_experts = pieces[0].of_expert
    each = pieces[: len(pieces) // config.axis_sizes["J"]] if of_experts else pieces
    leaves = plain_leaves(scheme, grouped.inputs, grouped.outputs, config.axis_sizes)
    parallel = grouped.expert_parallel and mesh.shape[TENSOR_AXIS] > 1
    read = _read_by_expert if of_experts and parallel else _read
    shardings, split = read(pieces, entries, config, mesh, block_bytes, parallel=parallel)
    dequantised = None
    of_parameters = {"expert_parallel": grouped.expert_parallel}
    if grouped.scheme != scheme:
        whole = parameter_sharding(grouped.letters, grouped.shape, mesh, **of_parameters)
        dequantised = np.dtype(dtype), whole
    stored_as = GroupedLinear(
        grouped.inputs,
        grouped.outputs,
        config,
        dtype,
        scheme=scheme,
        a=dict(zip(grouped.letters.split(), grouped.shape, strict=True)).get("A", 1),
        bias=False,
    )
    assembly = ExpertAssembly(
        format=weight_format,
        scheme=scheme,
        blocks=tuple(tuple(block.abstract for block in part) for part in split),
        tensor_shardings=tuple(shardings),
        projections=tuple(_projection(piece, leaves, config) for piece in each),
        of_experts=of_experts,
        parallel=parallel,
        arrays=tuple(
            PlannedArray(
                name=name,
                block=_block(grouped, dict(leaf.blocks)),
                axis=leaf.letters.split().index("A") if len(each) > 1 else None,
                sharding=parameter_sharding(
                    letters, stored_as.leaf_shape(name), mesh, **of_parameters
                ),
            )
            for (name, leaf), (_, letters) in zip(
                leaves.items(), stored_as.leaf_letters, strict=True
            )
        ),
        dequantised=dequantised,
    )
    return ParameterPlan(tuple(itertools.chain(*split)), assembly)


type _Read = tuple[list[NamedSharding], list[tuple[Block, ...]]]
"""The sharding of each tensor, and its blocks."""


def _read_by_expert(
    pieces: tuple[Piece, ...],
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
    *,
    parallel: bool,
) -> _Read:
    """Tensors of single experts, of which each device gets those of its own experts."""
    assert parallel
    sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))
    split = []
    for group in experts_of_devices(pieces, config, mesh):
        by_role = stored_experts(config, group)
        for role in [role for role, tensor in by_role[0].items() if tensor.used]:
            together = [entries[stored[role].name] for stored in by_role]
            dtype = common_dtype(together, [entry.file_dtype() for entry in together])
            shape = together[0].shape or (1,)
            split.append(stack_tensors(together, dtype, shape, sharding, block_bytes))
    return [sharding] * len(split), split


def _read(
    pieces: tuple[Piece, ...],
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
    *,
    parallel: bool,
) -> _Read:
    """Tensors of all experts, of which each device gets whole experts or its share of every one;
    or tensors of single experts, of which each device gets its share."""
    shardings, split = [], []
    for piece, stored in zip(pieces, stored_experts(config, pieces), strict=True):
        for tensor in (tensor for tensor in stored.values() if tensor.used):
            entry = entries[tensor.name]
            shape = entry.shape or (1,)
            if parallel:
                sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS))
            elif not piece.of_expert and isinstance(config.format, OnLoad):
                shape = read_shape(piece, config)
                sharding = piece_sharding(piece, config, mesh)
            else:
                sharding = tensor_sharding(tensor, shape, _one_expert(piece), config, mesh)
            shardings.append(sharding)
            split.append(split_rows(entry, entry.file_dtype(), 0, shape, sharding, block_bytes))
    return shardings, split


def _projection(piece: Piece, leaves: Mapping[str, Leaf], config: ModelConfig) -> StoredProjection:
    decoded, from_plain = piece, None
    if not piece.of_expert:
        decoded = _outputs_first(piece)
        if isinstance(config.format, OnLoad):
            letters = leaves["weight"].letters
            from_plain = view(piece, letters, config)
            experts, *outputs, inputs = letters.split()
            pattern = f"{experts} ({' '.join(outputs)}) {inputs}"
            decoded = dataclasses.replace(piece, pattern=pattern)
    used = [role for role, tensor in stored_experts(config, (piece,))[0].items() if tensor.used]
    outputs, inputs = tensor_shape(decoded, config)[-2:]
    return StoredProjection(
        roles=tuple(used),
        shape=(outputs, inputs),
        view=from_plain,
        views=tuple(leaf_view(decoded, leaf, config) for leaf in leaves.values()),
    )


def _block(grouped: GroupedLinear, shared: Mapping[str, int]) -> tuple[int, int]:
    """(outputs, inputs) that share an entry of a leaf, of all axes."""
    outputs, inputs = (
        math.prod(shared.get(letter, 1) for letter in letters.split())
        for letters in (grouped.outputs, grouped.inputs)
    )
    return outputs, inputs


def _one_expert(piece: Piece) -> Piece:
    """The piece of one expert, with the outputs first."""
    if piece.of_expert:
        return piece
    pattern = _outputs_first(piece).pattern.removeprefix("J ")
    return dataclasses.replace(piece, pattern=pattern, of_expert=True)


def _outputs_first(piece: Piece) -> Piece:
    """The piece with the axes in which quantised weights are stored: "J D (I A)" becomes
    "J (I A) D"."""
    experts, inputs, outputs = (
        " ".join(group) if len(group) == 1 else f"({' '.join(group)})" for group in groups(piece)
    )
    return dataclasses.replace(piece, pattern=f"{experts} {outputs} {inputs}")
