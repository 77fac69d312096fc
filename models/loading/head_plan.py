"""Loading a quantised output projection, which is dequantised on the way."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.loading.array_program import ArrayProgram
from rjax.models.loading.linear_plan import linear_plan
from rjax.models.loading.piece import Piece
from rjax.models.loading.pipeline import ParameterPlan
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.schemes import WeightScheme
from rjax.models.sharding import parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class DequantisedHead(ArrayProgram):
    """The table [V, D] of an output projection that is stored quantised.

    Attributes:
        arrays: makes the arrays of the scheme.
        scheme: of the arrays.
        names: of the arrays, in order.
        depth: D.
        dtype, sharding: of the table.
    """

    arrays: ArrayProgram
    scheme: WeightScheme
    names: tuple[str, ...]
    depth: int
    dtype: np.dtype
    sharding: NamedSharding

    def compile(self) -> None:
        """See the base class; what dequantises is compiled at its call."""
        self.arrays.compile()

    def __call__(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array]:
        """See the base class; one parameter."""
        return (_dequantise(self.arrays(arrays), self),)


@functools.partial(jax.jit, static_argnames=("head",))
def _dequantise(arrays: tuple[jax.Array, ...], head: DequantisedHead) -> jax.Array:
    leaves = dict(zip(head.names, arrays, strict=True))
    table = head.scheme.dequantise(leaves, head.depth, head.dtype).T
    return jax.lax.with_sharding_constraint(table, head.sharding)


def head_plan(
    pieces: tuple[Piece, ...],
    scheme: WeightScheme,
    entries: Mapping[str, TensorEntry],
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    """How the table of the output projection is loaded."""
    linear = Linear("D", "V", config, dtype, scheme=scheme)
    plan = linear_plan(linear, pieces, entries, config, mesh, block_bytes)
    assert plan.assembly is not None
    shape = (config.vocab_size, config.hidden_size)
    head = DequantisedHead(
        arrays=plan.assembly,
        scheme=scheme,
        names=tuple(name for name, _ in linear.leaf_letters),
        depth=config.hidden_size,
        dtype=np.dtype(dtype),
        sharding=parameter_sharding("V D", shape, mesh),
    )
    return ParameterPlan(plan.blocks, head)
