"""Loading the experts of a layer that a checkpoint stores quantised, widened on the devices."""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.config import ModelConfig
from rjax.models.errors import CheckpointError
from rjax.models.formats.weight_format import StoredTensor, WeightFormat
from rjax.models.loading.array_program import ArrayProgram, BlockArrays, Blocks
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
    blocks: Blocks
    tensor_sharding: NamedSharding
    view: View
    dtype: np.dtype
    sharding: NamedSharding

    @property
    def shardings(self) -> tuple[NamedSharding]:
        """See the base class; one parameter."""
        return (self.sharding,)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        joined = [join_blocks(blocks, self.tensor_sharding) for blocks in tensors]
        stored = dict(zip(self.roles, joined, strict=True))
        shape, order = self.view
        weight = self.format.decode_experts(stored, self.dtype).reshape(shape).transpose(order)
        return (jax.lax.with_sharding_constraint(weight, self.sharding),)


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
