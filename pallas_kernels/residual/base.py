"""The residual stream's operations: their problem, and each in plain JAX.

Sums over the devices run under ``shard_map``. Their order is that of the Mosaic kernel: a device
adds its own summands from the first to the last, then the shares of devices 0, 1, 2, ... are added,
all in float32. Every device has the same bits.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from rjax.pallas_kernels.kernel import Kernel, Problem, takes_all
from rjax.pallas_kernels.pending import Partial, reduced
from rjax.pallas_kernels.residual.peers import MAX_PUSHED_BYTES, Peers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidualProblem(Problem):
    """An update of the residual stream, or the argmax of logits that devices share.

    Attributes:
        operation: the operands and the result of each:

            - add_rms_norm: (x, update, norm weight) to (x + update, its norm);
            - all_reduce: (update, peers) to (its sum over the devices, peers), where the update is
              a Partial with a device's summands and peers a `Peers` or None;
            - all_reduce_rms_norm: (x, update, norm weight, peers) to (x + the sum of the update
              over the devices, its norm, peers);
            - all_reduce_argmax: (x [T, W], peers) to (the index of the largest number of each row
              over all devices, peers), where W are the columns of a device, in float32.

        depth: numbers of a row.
        columns: shape of the result after T.
        pending_bias: the update is a Partial with a bias.
        axis: mesh axis of the devices; None for one device.
        peer_capacity: numbers of a share that fit the exchange buffers of the devices; 0 without
            such buffers.
        eps: the norm's epsilon.
    """

    depth: int
    columns: tuple[int, ...] = ()
    pending_bias: bool = False
    axis: str | None = None
    peer_capacity: int = 0
    eps: float = 0.0


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    x = x + reduced(update)
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return x, (y * weight.astype(jnp.float32)).astype(x.dtype)


def all_reduce(update: Partial, axis: str) -> Float[Array, "T ..."]:
    """The sum over the devices of the mesh axis, in the dtype of the result, bias added.

    Up to ``MAX_PUSHED_BYTES`` each device gets the shares of all others. With more bytes each gets
    one part of them along the last axis, and then the sums of the other parts.
    """
    share = functools.reduce(operator.add, list(update.summands))
    devices = lax.axis_size(axis)
    width = share.shape[-1]
    if (devices - 1) * share.size * 4 <= MAX_PUSHED_BYTES or width % devices:
        total = _ordered_sum(lax.all_gather(share, axis)).astype(update.dtype)
    else:
        parts = share.reshape(*share.shape[:-1], devices, width // devices)
        received = lax.all_to_all(jnp.moveaxis(parts, -2, 0), axis, 0, 0)
        part = _ordered_sum(received).astype(update.dtype)
        total = lax.all_gather(part, axis, axis=part.ndim - 1, tiled=True)
    return total if update.bias is None else total + update.bias


def _ordered_sum(shares: Float32[Array, "X ..."]) -> Float32[Array, "..."]:
    return functools.reduce(operator.add, list(shares))


def local_argmax(
    x: Float32[Array, "B W"], axis: str
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """(the largest number of each row of this device, its index over all devices).

    Among equal numbers, the first counts. Runs under ``shard_map``; the devices of the axis share
    the columns.
    """
    first = lax.axis_index(axis) * x.shape[1]
    return jnp.max(x, axis=-1), jnp.argmax(x, axis=-1).astype(jnp.int32) + first


def all_reduce_argmax(x: Float32[Array, "B W"], axis: str) -> Int32[Array, " B"]:
    """``jnp.argmax`` over the columns of all devices, with one all-gather.

    Among equal numbers, the first counts. Runs under ``shard_map``.
    """
    values, indices = local_argmax(x, axis)
    bits = lax.bitcast_convert_type(values, jnp.int32)
    found = lax.all_gather(jnp.stack([bits, indices]), axis)  # [devices, 2, B]
    values = lax.bitcast_convert_type(found[:, 0], jnp.float32)
    device = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(found[:, 1], device[None], axis=0)[0]


def _norm(problem: ResidualProblem, x: Array, update: Array | Partial, weight: Array) -> Any:
    return add_rms_norm(x, update, weight, problem.eps)


def _sum(problem: ResidualProblem, update: Partial, peers: Peers | None) -> Any:
    assert problem.axis is not None
    return all_reduce(update, problem.axis), peers


def _argmax(problem: ResidualProblem, x: Float32[Array, "T W"], peers: Peers | None) -> Any:
    assert problem.axis is not None
    return all_reduce_argmax(x, problem.axis), peers


PLAIN_KERNELS = (
    Kernel("xla.add_rms_norm", "add_rms_norm", "xla", takes_all, _norm),
    Kernel("xla.all_reduce", "all_reduce", "xla", takes_all, _sum),
    Kernel("xla.all_reduce_argmax", "all_reduce_argmax", "xla", takes_all, _argmax),
)
