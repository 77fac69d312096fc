"""How the devices of a mesh share the results of kernels, as partition specs."""

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import Array

from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.pending import Partial
from rjax.worker.kernels.linear_problem import LinearSharding

_PROJECTIONS = PartitionSpec(None, TENSOR_AXIS, None, None)
_SHARES = PartitionSpec(TENSOR_AXIS)


def qkv_specs(qkv: Array | Partial) -> Any:
    """Specs of the projections of queries, keys and values, sharded along K."""
    if not isinstance(qkv, Partial):
        return _PROJECTIONS
    bias = None if qkv.bias is None else PartitionSpec(TENSOR_AXIS, None, None)
    return Partial(PartitionSpec(None, *_PROJECTIONS), bias, qkv.dtype)  # type: ignore[arg-type]


def value_specs(sharding: LinearSharding, activated: bool = False) -> Callable[[Any], Any]:
    """A function from a projection's result to its specs.

    The summands of a Partial may be sharded.
    """
    columns = sharding.outputs[-1:] if activated else sharding.outputs

    def specs(found: Any) -> Any:
        if not isinstance(found, Partial):
            return PartitionSpec(None, *columns)
        first = TENSOR_AXIS if sharding.needs_partial else None
        return Partial(PartitionSpec(first, None, *columns), None, found.dtype)  # type: ignore[arg-type]

    return specs


def shares(found: Any) -> Any:
    """Specs of a result of experts, whose summands are the devices' shares."""
    return Partial(_SHARES, None, found.dtype)  # type: ignore[arg-type]
