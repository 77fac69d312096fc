"""Loading the experts of a layer that a checkpoint stores quantised, widened on the devices."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.formats.weight_format import StoredTensor, WeightFormat
from rjax.models.loading.array_program import ArrayProgram
from rjax.models.loading.assembly import join_blocks
from rjax.models.loading.blocks import split_rows
from rjax.models.loading.layout import View, groups, tensor_shape, view
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.sharding import parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class WidenedExperts(ArrayProgram):
    """Makes the weight of all experts of stored tensors.

    Layers with equal programs share one.

    Attributes:
        format: of the tensors.
        roles: of the tensors, in order.
        blocks: shape, dtype and sharding of the blocks of each tensor.
        tensor_sharding: of each whole tensor.
        view: from [J, outputs, inputs] to the parameter.
        dtype, sharding: of the parameter.
    """

    format: WeightFormat
    roles: tuple[str, ...]
    blocks: tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
    tensor_sharding: NamedSharding
    view: View
    dtype: np.dtype
    sharding: NamedSharding

    def compile(self) -> None:
        """See the base class."""
        _widen.lower(self.blocks, self).compile()

    def __call__(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        remaining = iter(arrays)
        tensors = [tuple(itertools.islice(remaining, len(blocks))) for blocks in self.blocks]
        return (_widen(tuple(tensors), self),)


@functools.partial(jax.jit, static_argnames=("program",))
def _widen(tensors: tuple[tuple[jax.Array, ...], ...], program: WidenedExperts) -> jax.Array:
    joined = [join_blocks(blocks, program.tensor_sharding) for blocks in tensors]
    stored = dict(zip(program.roles, joined, strict=True))
    shape, order = program.view
    weight = program.format.decode_experts(stored, program.dtype).reshape(shape).transpose(order)
    return jax.lax.with_sharding_constraint(weight, program.sharding)


def stored_experts(config: ModelConfig, piece: Piece) -> Mapping[str, StoredTensor]:
    """The tensors by role of a weight that is stored quantised.

    Raises:
        CheckpointError: the format has blocks that do not divide the weight.
    """
    assert config.format is not None
    shape = tensor_shape(_outputs_first(piece), config)
    J, outputs, inputs = shape
    tensors = config.format.expert_tensors(piece.tensor, (J, outputs, inputs))
    if tensors is None:
        raise CheckpointError(f"{piece.tensor}: the format cannot store experts of shape {shape}")
    return tensors


def expert_plan(
    parameter: nnx.Variable,
    piece: Piece,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the weight of all experts of a layer is loaded."""
    assert config.format is not None
    letters: str = parameter.get_metadata("letters")
    abstract = parameter.get_value()
    stored = stored_experts(config, piece)
    whole = NamedSharding(mesh, PartitionSpec())
    split = [
        split_rows(entry, entry.file_dtype(), 0, entry.shape, whole, block_bytes)
        for entry in (entries[tensor.name] for tensor in stored.values())
    ]
    program = WidenedExperts(
        format=config.format,
        roles=tuple(stored),
        blocks=tuple(tuple(block.abstract for block in part) for part in split),
        tensor_sharding=whole,
        view=view(_outputs_first(piece), letters, config),
        dtype=np.dtype(abstract.dtype),
        sharding=parameter_sharding(letters, abstract.shape, mesh),
    )
    return ParameterPlan(tuple(itertools.chain(*split)), program)


def _outputs_first(piece: Piece) -> Piece:
    """The piece with the axes in which quantised weights are stored: "J D (I A)" becomes
    "J (I A) D"."""
    experts, inputs, outputs = (
        " ".join(group) if len(group) == 1 else f"({' '.join(group)})" for group in groups(piece)
    )
    return dataclasses.replace(piece, pattern=f"{experts} {outputs} {inputs}")
