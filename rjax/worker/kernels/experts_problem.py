"""The problem that a layer's experts pose to each device of a mesh, and its operands."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from rjax.models import Linear
from rjax.models.layers.parameter import variable_spec
from rjax.models.schemes import Scaled
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.experts.base import ExpertsProblem
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.weight import ScaledLayout


def expert_specs(up: Linear, down: Linear, mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """How this mesh shards the leaves of both weights and both biases: the width I of every expert,
    or the experts J.
    """
    leaves = [
        {name: variable_spec(getattr(linear, name), mesh) for name, _ in linear.leaf_letters}
        for linear in (up, down)
    ]
    if up.bias is None:
        return *leaves, None, None
    shares = PartitionSpec()
    if mesh.size > 1:
        whole = PartitionSpec(None, TENSOR_AXIS)
        shares = whole if down.expert_parallel else PartitionSpec(TENSOR_AXIS)
    return *leaves, variable_spec(up.bias, mesh), shares


def own_experts(
    chosen: Int[Array, "T X"], up: Linear, mesh: Mesh | AbstractMesh
) -> tuple[Int[Array, "rows X"], PartitionSpec]:
    """The experts of each row as a device counts its own, and their specs.

    Where devices hold whole experts, the rows of each device follow those of the one before; an
    expert of another device is none.
    """
    devices = mesh.shape[TENSOR_AXIS]
    if not up.expert_parallel or devices == 1:
        return chosen, PartitionSpec()
    local = up.num_experts // devices
    own = chosen[None] - jnp.arange(devices, dtype=chosen.dtype)[:, None, None] * local
    own = jnp.where((own >= 0) & (own < local), own, local)
    return own.reshape(-1, chosen.shape[1]), PartitionSpec(TENSOR_AXIS)


def shares_of_bias(down: Linear, mesh: Mesh | AbstractMesh) -> Array | None:
    """The second bias with an axis before it; the bias itself on one device.

    Where each device has a share of every expert, the axis has the devices: the bias for the first
    one and zeros for the others, whose shares of the result are added to its. Where devices hold
    whole experts, the axis has one entry.
    """
    bias = down.bias_array
    if bias is None or mesh.size == 1:
        return bias
    if down.expert_parallel:
        return bias[None]
    return jnp.zeros((mesh.size, *bias.shape), bias.dtype).at[0].set(bias)


def experts_problem(
    up: Linear,
    down: Linear,
    mesh: Mesh | AbstractMesh,
    *,
    rows: int,
    dtype: DTypeLike,
    activation: Activation,
) -> ExpertsProblem:
    """The problem by which a kernel is chosen.

    Args:
        up, down: the weights of all experts, [D, A, I] and [I, D] each.
        mesh: the devices.
        rows: number of rows, T.
        dtype: dtype of the rows.
        activation: activation between the two products.
    """
    J, D, (A, width) = up.num_experts, up.depth, up.output_shape
    devices = mesh.shape[TENSOR_AXIS]
    local = J // devices if up.expert_parallel else J
    own_width = width if up.expert_parallel else width // devices
    return ExpertsProblem(
        operation="experts",
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        label="D -> I -> D",
        depth=D,
        columns=(A, own_width),
        scheme=up.storage,
        layout=_layout(up, D),
        down_scheme=down.storage,
        down_layout=_layout(down, own_width),
        activation=activation,
        needs_partial=devices > 1,
        experts_elsewhere=J - local,
    )


def _layout(linear: Linear, depth: int) -> ScaledLayout | None:
    """The weight of one expert on one device, with ``depth`` inputs."""
    scheme = linear.storage
    if not isinstance(scheme, Scaled):
        return None
    if scheme.block[1] is None:
        return scheme.layout((1, depth))
    # The scales have the axes J, inputs, outputs; of the outputs, blocks share the last.
    scale = linear.leaf_shape("weight_scale")
    return scheme.layout((linear.output_shape[-1] // scale[-1], linear.depth // scale[1]))
