"""The problem that a layer's experts pose to each device of a mesh."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from rjax.models import Activation, GroupedLinear
from rjax.models.sharding import TENSOR_AXIS, partition_spec
from rjax.worker.kernels.problem import Problem


def expert_specs(
    up: GroupedLinear, down: GroupedLinear, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec, PartitionSpec]:
    """How this mesh shards both weights: the width I of every expert."""
    specs = [partition_spec(linear.letters, linear.shape, mesh) for linear in (up, down)]
    return specs[0], specs[1]


def experts_problem(
    up: GroupedLinear,
    mesh: Mesh | AbstractMesh,
    *,
    rows: int,
    top_k: int,
    dtype: DTypeLike,
    activation: Activation,
) -> Problem:
    """What a kernel is chosen by.

    Args:
        up: [J, D, A, I].
        mesh: the devices.
        rows: T.
        top_k: experts of a row.
        dtype: of the rows.
        activation: between the products.
    """
    J, D, A, width = up.shape
    devices = mesh.shape[TENSOR_AXIS]
    return Problem(
        operation="experts",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        label="D -> I -> D",
        depth=D,
        columns=(A, width // devices),
        activation=activation,
        needs_partial=devices > 1,
        num_experts=J,
        top_k=top_k,
    )
