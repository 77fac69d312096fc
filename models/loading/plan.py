"""The plan of each parameter: the blocks to read, and the program that makes arrays of them."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.formats import FloatWeights, Plain, WeightFormat
from rjax.models.formats.weight_format import FLOATS, StoredTensor
from rjax.models.layers.linear import Linear
from rjax.models.layers.parameter import leaf_parameter, variable_sharding
from rjax.models.loading.assembly import Assembly, Dequantised, PlannedLeaf, StoredPiece
from rjax.models.loading.blocks import Block, split_rows, stack_tensors
from rjax.models.loading.pieces import (
    Piece,
    View,
    experts_of_devices,
    groups,
    module_of,
    piece_shape,
    piece_sharding,
    read_shape,
    tensor_shape,
    view,
)
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.tensors import TensorEntry
from rjax.models.schemes import UNQUANTISED, Leaf, WeightScheme
from rjax.models.sharding import TENSOR_AXIS


@dataclasses.dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight, or another parameter, as a checkpoint stores it.

    Attributes:
        pieces: the pieces of the parameter.
        format: how their tensors are decoded.
        scheme: what they are decoded to.
        leaves: the arrays of the scheme in plain order.
        inputs, outputs: axis letters of a projection; empty for other parameters.
        of_experts: the arrays have all experts of a layer, along their first axis J.
        dequantise: the parameter is the weight in the model's dtype, not the arrays.
    """

    pieces: tuple[Piece, ...]
    format: WeightFormat
    scheme: WeightScheme
    leaves: Mapping[str, Leaf]
    inputs: str = ""
    outputs: str = ""
    of_experts: bool = False
    dequantise: bool = False

    @property
    def letters(self) -> str:
        """Axis letters of a dequantised projection, inputs first."""
        return f"{'J ' if self.of_experts else ''}{self.inputs} {self.outputs}"


def plain_weight(variable: nnx.Variable, pieces: tuple[Piece, ...]) -> StoredWeight:
    """A parameter that is stored as floats."""
    dtype = np.dtype(variable.get_value().dtype)
    leaf = Leaf(variable.get_metadata("letters"), dtype)
    stored_as = Plain(dtype, pieces[0].offset)
    return StoredWeight(pieces, stored_as, UNQUANTISED, {"weight": leaf})


def scheme_weight(
    module: Linear,
    scheme: WeightScheme,
    pieces: tuple[Piece, ...],
    config: ModelConfig,
) -> StoredWeight:
    """The weight of a projection that the config's format decodes to a scheme.

    It is dequantised if the module's own scheme is another.
    """
    assert config.format is not None
    of_experts = module.num_experts > 0
    sizes = pieces[0].config(config).axis_sizes
    leaves = scheme.leaves(module.inputs, module.outputs, sizes)
    if of_experts:
        leaves = {name: leaf.of_experts for name, leaf in leaves.items()}
    return StoredWeight(
        pieces,
        config.format,
        scheme,
        leaves,
        module.inputs,
        module.outputs,
        of_experts,
        dequantise=module.scheme != scheme,
    )


def stored_tensors(
    piece: Piece, weight_format: WeightFormat, config: ModelConfig
) -> Mapping[str, StoredTensor]:
    """The tensors of a piece by role.

    Raises:
        CheckpointError: the piece has all experts, which the format cannot store in one tensor.
    """
    if isinstance(weight_format, FloatWeights):
        return {"weight": StoredTensor(piece.tensor, (tensor_shape(piece, config),), FLOATS)}
    if not _has_all_experts(piece):
        outputs, inputs = tensor_shape(piece, config)
        return weight_format.tensors(module_of(piece), (outputs, inputs))
    J, outputs, inputs = tensor_shape(_outputs_first(piece), config)
    tensors = weight_format.expert_tensors(piece.tensor, (J, outputs, inputs))
    if tensors is None:
        raise CheckpointError(
            f"{piece.tensor} holds all experts of a layer, which checkpoints of the quant_method "
            f"{config.quant_method!r} cannot store in one tensor"
        )
    return tensors


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """Plans how the parameters of a model are loaded.

    Attributes:
        entries: the tensors of the checkpoint by name.
        config: the model's config.
        mesh: the devices.
        block_bytes: larger tensors are split into blocks of about this size; None to split none.
    """

    entries: Mapping[str, TensorEntry]
    config: ModelConfig
    mesh: Mesh
    block_bytes: int | None

    def plan(self, weight: StoredWeight, targets: Sequence[nnx.Variable]) -> ParameterPlan:
        """How the parameters of a weight are loaded: the arrays of its scheme in order, or the
        weight if it is dequantised."""
        pieces = weight.pieces
        stacks = pieces[0].of_expert
        each = pieces[: len(pieces) // self.config.axis_sizes["J"]] if stacks else pieces
        expert_parallel: bool = targets[0].get_metadata("expert_parallel")
        parallel = expert_parallel and self.mesh.shape[TENSOR_AXIS] > 1
        numbers, shardings, split = self._read(weight, parallel=parallel)
        blocks = tuple(itertools.chain(*split))
        planned = tuple(self._piece(piece, weight, numbers) for piece in each)
        if len(blocks) == 1 and isinstance(weight.format, Plain) and not stacks:
            same = blocks[0].dtype == weight.format.dtype and not weight.format.offset
            if same and planned[0].views[0].is_identity:
                shape = targets[0].get_value().shape
                sharding = variable_sharding(targets[0], self.mesh)
                whole = dataclasses.replace(blocks[0], shape=shape, sharding=sharding)
                return ParameterPlan((whole,))
        sizes = pieces[0].config(self.config).axis_sizes
        sizes |= {"A": sum(piece.a for piece in each)}
        dequantised = None
        if weight.dequantise:
            (target,) = targets
            letters, dtype = weight.letters.split(), np.dtype(target.get_value().dtype)
            order = (letters.index(letter) for letter in target.get_metadata("letters").split())
            dequantised = Dequantised(
                depth=math.prod(sizes[letter] for letter in weight.inputs.split()),
                view=View(tuple(sizes[letter] for letter in letters), tuple(order)),
                dtype=dtype,
                sharding=variable_sharding(target, self.mesh),
            )
            targets = [
                leaf_parameter(leaf, sizes, dtype, expert_parallel=expert_parallel)
                for leaf in weight.leaves.values()
            ]
        assembly = Assembly(
            format=weight.format,
            scheme=weight.scheme,
            blocks=tuple(tuple(block.abstract for block in part) for part in split),
            tensor_shardings=tuple(shardings),
            pieces=planned,
            leaves=tuple(
                PlannedLeaf(
                    name=name,
                    dtype=np.dtype(target.get_value().dtype),
                    block=(_shared(leaf, weight.outputs), _shared(leaf, weight.inputs)),
                    axis=leaf.letters.split().index("A") if len(each) > 1 else None,
                    sharding=variable_sharding(target, self.mesh),
                )
                for (name, leaf), target in zip(weight.leaves.items(), targets, strict=True)
            ),
            of_experts=weight.of_experts,
            stacks=stacks,
            parallel=parallel,
            dequantised=dequantised,
        )
        return ParameterPlan(blocks, assembly)

    def _read(
        self, weight: StoredWeight, *, parallel: bool
    ) -> tuple[dict[tuple[str, int], int], list[NamedSharding], list[tuple[Block, ...]]]:
        """The number, the sharding and the blocks of each tensor, or of some rows of it.

        Numbers are by name and first row. If devices hold whole experts, tensors of single experts
        are read together that the devices hold in the same place.
        """
        floats = isinstance(weight.format, FloatWeights)
        dtype = weight.format.dtype if isinstance(weight.format, Plain) else None
        together = [(piece,) for piece in weight.pieces]
        spread = parallel and weight.pieces[0].of_expert
        if spread:
            together = experts_of_devices(weight.pieces, self.config, self.mesh)
        of_devices = NamedSharding(self.mesh, PartitionSpec(TENSOR_AXIS))
        numbers, shardings, split = {}, [], []
        for first, *others in together:
            key_row = first.first_row if floats else 0
            stored = [stored_tensors(p, weight.format, self.config) for p in (first, *others)]
            for role, tensor in stored[0].items():
                if not tensor.used or (tensor.name, key_row) in numbers:
                    continue
                numbers[tensor.name, key_row] = len(numbers)
                entries = [self.entries[tensors[role].name] for tensors in stored]
                dtypes = [e.stored_dtype(dtype) if floats else e.file_dtype() for e in entries]
                shape = read_shape(first, self.config) if floats else entries[0].shape or (1,)
                sharding = of_devices
                if not parallel:
                    sharding = self._sharding(first, None if floats else tensor, shape)
                shardings.append(sharding)
                if spread:
                    _check_types(entries, dtypes)
                    split.append(
                        stack_tensors(entries, dtypes[0], shape, sharding, self.block_bytes)
                    )
                else:
                    split.append(
                        split_rows(
                            entries[0], dtypes[0], key_row, shape, sharding, self.block_bytes
                        )
                    )
        return numbers, shardings, split

    def _sharding(
        self, piece: Piece, tensor: StoredTensor | None, shape: tuple[int, ...]
    ) -> NamedSharding:
        """The sharding of a tensor of a format, or of a piece of floats for None.

        It is the parameter's on each axis that it divides; devices get the other axes whole.
        """
        if tensor is None:
            return piece_sharding(piece, self.config, self.mesh)
        if _has_all_experts(piece):
            pattern = _outputs_first(piece).pattern.removeprefix("J ")
            piece = dataclasses.replace(piece, pattern=pattern)
        of_piece = piece_sharding(piece, self.config, self.mesh)
        outputs, inputs = (*of_piece.spec, None, None)[:2]
        of_axes = {"outputs": outputs if piece.rows is None else None, "inputs": inputs, None: None}
        spec = [
            None
            if of_axes[axis] is None or size % of_piece.mesh.shape[of_axes[axis]]
            else of_axes[axis]
            for axis, size in zip(tensor.axes, shape, strict=True)
        ]
        return of_piece.update(spec=PartitionSpec(*spec))

    def _piece(
        self, piece: Piece, weight: StoredWeight, numbers: Mapping[tuple[str, int], int]
    ) -> StoredPiece:
        floats = isinstance(weight.format, FloatWeights)
        decoded, outputs_first = piece, None
        if weight.of_experts and _has_all_experts(piece):
            decoded = _outputs_first(piece)
            if floats:
                letters = weight.leaves["weight"].letters
                outputs_first = view(piece, letters, self.config)
                experts, *outputs, inputs = letters.split()
                pattern = f"{experts} ({' '.join(outputs)}) {inputs}"
                decoded = dataclasses.replace(piece, pattern=pattern)
        shape = (piece_shape if floats else tensor_shape)(decoded, self.config)
        outputs, *inputs = shape[1:] if decoded is not piece else shape
        stored = stored_tensors(piece, weight.format, self.config)
        used = {role: tensor.name for role, tensor in stored.items() if tensor.used}
        key_row = piece.first_row if floats else 0
        rows = None
        if piece.rows is not None and not floats:
            rows = piece.first_row, piece_shape(piece, self.config)[0]
        return StoredPiece(
            roles=tuple(used),
            tensors=tuple(numbers[name, key_row] for name in used.values()),
            shape=(outputs, math.prod(inputs)),
            rows=rows,
            outputs_first=outputs_first,
            views=tuple(
                view(decoded, leaf.letters, self.config, leaf.blocks)
                for leaf in weight.leaves.values()
            ),
        )


def _shared(leaf: Leaf, letters: str) -> int:
    """Entries of the weight, of the axes ``letters`` together, that share an entry of a leaf."""
    return math.prod(size for letter, size in leaf.blocks if letter in letters.split())


def _has_all_experts(piece: Piece) -> bool:
    """Whether a piece of a projection has the matrices of all experts of a layer."""
    first, *others = groups(piece)
    return first == ["J"] and len(others) == 2


def _outputs_first(piece: Piece) -> Piece:
    """The piece with the axes in which quantised weights are stored: "J D (I A)" becomes
    "J (I A) D"."""
    experts, *axes = groups(piece)
    inputs = ["D"] if any("A" in axis for axis in axes) else ["I"]
    ordered = [experts, *sorted(axes, key=lambda axis: axis == inputs)]
    pattern = (" ".join(axis) if len(axis) == 1 else f"({' '.join(axis)})" for axis in ordered)
    return dataclasses.replace(piece, pattern=" ".join(pattern))


def _check_types(entries: Sequence[TensorEntry], dtypes: Sequence[np.dtype]) -> None:
    """Raise CheckpointError if tensors that are loaded together differ in type."""
    for entry, dtype in zip(entries, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise CheckpointError(
                f"{entry.file.name}: {entry.name} has the type {entry.dtype}, and {entries[0].name}"
                f" has {entries[0].dtype}; with expert parallelism, the experts of a layer must "
                "have one type"
            )
