"""The problem that a layer's experts pose to each device of a mesh."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from rjax.models import Activation, GroupedLinear
from rjax.models.sharding import TENSOR_AXIS, partition_spec
from rjax.worker.kernels.problem import Problem


def expert_specs(
    up: GroupedLinear, down: GroupedLinear, mesh: Mesh | AbstractMesh
) -> tuple[PartitionSpec | None, ...]:
    """How this mesh shards both weights and both biases: the width I of every expert."""
    specs = [partition_spec(linear.letters, linear.shape, mesh) for linear in (up, down)]
    shares = PartitionSpec(TENSOR_AXIS) if mesh.size > 1 else PartitionSpec()
    biases = [PartitionSpec(None, *specs[0][2:]), shares]
    return *specs, *(None if up.bias is None else spec for spec in biases)


def shares_of_bias(bias: Array | None, mesh: Mesh) -> Array | None:
    """[devices, ...]: the bias for the first device and zeros for the others, whose shares of the
    result are added to its; the bias itself on one device."""
    if bias is None or mesh.size == 1:
        return bias
    return jnp.zeros((mesh.size, *bias.shape), bias.dtype).at[0].set(bias)


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
        bias=up.bias is not None,
        needs_partial=devices > 1,
        num_experts=J,
        top_k=top_k,
    )
