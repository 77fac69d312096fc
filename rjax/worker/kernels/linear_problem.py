"""The problem that a `Linear` poses to each device of a mesh."""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from rjax.models import Linear
from rjax.models.schemes import Scaled
from rjax.models.sharding import TENSOR_AXIS, partition_spec
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.gemm.base import LinearProblem
from rjax.pallas_kernels.weight import ScaledLayout


@dataclasses.dataclass(frozen=True, slots=True)
class LinearSharding:
    """How a `Linear` is sharded over the devices of a mesh.

    Attributes:
        leaves: partition spec of each leaf of the weight, by name.
        inputs: mesh axis that shards the flattened input axes, one entry of a spec.
        outputs: mesh axis that shards each of the result's axes after T.
        depth, columns: contracted entries, and shape of the result after T, of one device's part.
        needs_partial: the inputs are sharded, so that each device has a share of the result.
    """

    leaves: dict[str, PartitionSpec]
    inputs: str | None
    outputs: tuple[str | None, ...]
    depth: int
    columns: tuple[int, ...]
    needs_partial: bool


def linear_sharding(linear: Linear, mesh: Mesh | AbstractMesh) -> LinearSharding:
    """How this mesh shards a projection; on one device everything is whole."""
    devices = mesh.shape[TENSOR_AXIS]
    shape = (*linear.input_shape, *linear.output_shape)
    spec = tuple(partition_spec(f"{linear.inputs} {linear.outputs}", shape, mesh))
    inputs, outputs = spec[: len(linear.input_shape)], spec[len(linear.input_shape) :]
    # The first input axis leads the flattened one, so a cut of it is a cut of that.
    assert not any(inputs[1:])
    return LinearSharding(
        leaves={
            name: partition_spec(letters, getattr(linear, name).shape, mesh)
            for name, letters in linear.leaf_letters
        },
        inputs=inputs[0],
        outputs=outputs,
        depth=math.prod(linear.input_shape) // (devices if inputs[0] else 1),
        columns=tuple(
            size // (devices if cut else 1)
            for size, cut in zip(linear.output_shape, outputs, strict=True)
        ),
        needs_partial=inputs[0] is not None,
    )


def linear_problem(
    operation: str,
    linear: Linear,
    sharding: LinearSharding,
    *,
    rows: int,
    dtype: DTypeLike,
    activation: Activation | None = None,
    eps: float = 0.0,
    pending_bias: bool = False,
    early_weights: bool = False,
) -> LinearProblem:
    """The problem by which a kernel is chosen."""
    return LinearProblem(
        operation=operation,
        rows=rows,
        dtype=jnp.dtype(dtype).name,
        label=f"{linear.inputs} -> {linear.outputs}",
        depth=sharding.depth,
        columns=sharding.columns,
        scheme=linear.scheme,
        layout=_layout(linear, sharding.depth),
        activation=activation,
        bias=linear.bias is not None,
        pending_bias=pending_bias,
        needs_partial=sharding.needs_partial,
        early_weights=early_weights,
        eps=eps,
    )


def _layout(linear: Linear, depth: int) -> ScaledLayout | None:
    """The weight of one device, with ``depth`` inputs."""
    scheme = linear.scheme
    if not isinstance(scheme, Scaled):
        return None
    weight, scale = (getattr(linear, name).shape for name in ("weight", "weight_scale"))
    outputs = len(linear.output_shape)
    rows = math.prod(weight[:outputs]) // math.prod(scale[:outputs])
    columns = min(depth, math.prod(weight[outputs:]) // math.prod(scale[outputs:]))
    return scheme.layout((rows, columns))
