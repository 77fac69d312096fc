"""Loading quantised weights that are dequantised on the way."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.loading.array_program import ArrayProgram, BlockArrays, Blocks
from rjax.models.loading.linear_plan import linear_plan
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.schemes import WeightScheme
from rjax.models.sharding import parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class DequantisedWeight(ArrayProgram):
    """A weight that is stored quantised.

    Attributes:
        arrays: makes the arrays of the scheme.
        scheme: weight scheme of the arrays.
        names: leaf names of the arrays, in order.
        depth: number of inputs.
        shape, dtype, sharding: shape, dtype and sharding of the dequantised weight.
        outputs_first: whether the outputs are its first axis.
    """

    arrays: ArrayProgram
    scheme: WeightScheme
    names: tuple[str, ...]
    depth: int
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    outputs_first: bool

    @property
    def blocks(self) -> Blocks:  # type: ignore[override]
        """See the base class."""
        return self.arrays.blocks

    @property
    def shardings(self) -> tuple[NamedSharding]:
        """See the base class; one parameter."""
        return (self.sharding,)

    def trace(self, tensors: BlockArrays) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        leaves = dict(zip(self.names, self.arrays.trace(tensors), strict=True))
        value = self.scheme.dequantise(leaves, self.depth, self.dtype)
        value = (value.T if self.outputs_first else value).reshape(self.shape)
        return (jax.lax.with_sharding_constraint(value, self.sharding),)


def head_plan(
    pieces: tuple[Piece, ...],
    scheme: WeightScheme,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the table [V, D] of the output projection is loaded."""
    linear = Linear("D", "V", config, dtype, scheme=scheme)
    plan = linear_plan(linear, pieces, entries, config, mesh, block_bytes)
    shape = (config.vocab_size, config.hidden_size)
    return _dequantised(plan, linear, shape, "V D", dtype, mesh, outputs_first=True)


def dequantised_plan(
    unquantised: Linear,
    pieces: tuple[Piece, ...],
    scheme: WeightScheme,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the weight of an unquantised `Linear` is loaded that is stored in a scheme."""
    inputs, outputs = unquantised.inputs, unquantised.outputs
    a = dict(zip(outputs.split(), unquantised.output_shape, strict=True)).get("A", 1)
    linear = Linear(inputs, outputs, config, dtype, scheme=scheme, a=a)
    plan = linear_plan(linear, pieces, entries, config, mesh, block_bytes)
    shape = (*linear.input_shape, *linear.output_shape)
    letters = f"{inputs} {outputs}"
    return _dequantised(plan, linear, shape, letters, dtype, mesh, outputs_first=False)


def _dequantised(
    plan: ParameterPlan,
    linear: Linear,
    shape: tuple[int, ...],
    letters: str,
    dtype: DTypeLike,
    mesh: Mesh,
    *,
    outputs_first: bool,
) -> ParameterPlan:
    """Convert the plan of the quantised arrays to that of the weight with these axes."""
    assert plan.assembly is not None
    weight = DequantisedWeight(
        arrays=plan.assembly,
        scheme=linear.scheme,
        names=tuple(name for name, _ in linear.leaf_letters),
        depth=linear.depth,
        shape=shape,
        dtype=np.dtype(dtype),
        sharding=parameter_sharding(letters, shape, mesh),
        outputs_first=outputs_first,
    )
    return ParameterPlan(plan.blocks, weight)
