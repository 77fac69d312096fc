"""Sums of the devices' shares (residual stream, embedding), and the argmax of their logits."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from rjax.models import Embedding, Norm
from rjax.models.sharding import TENSOR_AXIS, partition_spec
from rjax.pallas_kernels.kernel import Problem
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.base import ResidualProblem
from rjax.pallas_kernels.residual.peers import Peers
from rjax.sampling import first_largest
from rjax.worker.kernels import Choice
from rjax.worker.kernels.run import RunKernel

_SHARES, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()


class DeviceSums:
    """The operations named all_reduce of one trace of the step.

    The Mosaic kernels exchange shares through ``peers``. Where they refuse, XLA's collectives do,
    and shares are added in the same order.

    Args:
        mesh: mesh of several devices.
        choose: chooses the kernel of a problem.
        run: runs a kernel on the mesh.
        peers: exchange buffers of the mesh, or None.

    Attributes:
        peers: exchange buffers for the next exchange. Each takes them from the one before, which
            keeps all exchanges of a device in one order.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        choose: Callable[[Problem], Choice],
        run: RunKernel,
        peers: Peers | None,
    ) -> None:
        self.peers = peers
        self._run = run
        self._mesh = mesh
        self._choose = choose

    def all_reduce(self, update: Partial) -> Float[Array, "T ..."]:
        """The sum over the devices."""
        choice = self._choose(self._problem("all_reduce", update))
        [total] = self._sum(choice, (update,), (_share_specs(update),))
        return total

    def all_reduce_rms_norm(
        self, x: Float[Array, "T D"], update: Partial, norm: Norm
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]] | None:
        """(x + the sum of the update over the devices, the RMSNorm of it).

        None where no kernel does both: the sum and the norm are then operations of their own.
        """
        choice = self._choose(self._problem("all_reduce_rms_norm", update, norm.eps))
        if choice.kernel is None:
            return None
        operands = (x, update, norm.weight[...])
        x, h = self._sum(choice, operands, (_WHOLE, _share_specs(update), _WHOLE))
        return x, h

    def embed(self, embedding: Embedding, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The embeddings of tokens; each device looks up those of its part of the vocabulary."""
        table = embedding.weight[...]
        spec = partition_spec("V D", table.shape, self._mesh)
        if spec[0] is None:  # every device has the whole table
            return embedding(tokens)
        lookup = jax.shard_map(
            _lookup,
            mesh=self._mesh,
            in_specs=(spec, _WHOLE),
            out_specs=_SHARES,
            check_vma=False,
        )
        return self.all_reduce(Partial(lookup(table, tokens), dtype=table.dtype))

    def argmax(self, logits: Float32[Array, "B V"]) -> Int[Array, " B"]:
        """``jnp.argmax`` over V, with one exchange if the devices share V; no NaN."""
        spec = partition_spec("B V", logits.shape, self._mesh)
        if spec[1] is None:  # every device has all logits
            return first_largest(logits)
        B, V = logits.shape
        problem = ResidualProblem(
            operation="all_reduce_argmax",
            rows=B,
            dtype="float32",
            depth=V // self._mesh.size,
            axis=TENSOR_AXIS,
            peer_capacity=0 if self.peers is None else self.peers.capacity,
        )
        [found] = self._sum(self._choose(problem), (logits,), (spec,))
        return found

    def _problem(self, operation: Any, update: Partial, eps: float = 0.0) -> ResidualProblem:
        return ResidualProblem(
            operation=operation,
            rows=len(update),
            dtype=jnp.dtype(update.dtype).name,
            depth=math.prod(update.shape[1:]),
            columns=update.shape[1:],
            axis=TENSOR_AXIS,
            pending_bias=update.bias is not None,
            peer_capacity=0 if self.peers is None else self.peers.capacity,
            eps=eps,
        )

    def _sum(
        self, choice: Choice, operands: tuple[Any, ...], specs: tuple[Any, ...]
    ) -> tuple[Array, ...]:
        assert choice.kernel is not None, "plain JAX takes every all_reduce"
        *found, self.peers = self._run(
            choice.kernel,
            choice.problem,
            (*operands, self.peers),
            (*specs, None if self.peers is None else _SHARES),
            lambda found: (*(_WHOLE for _ in found[:-1]), _peer_specs(found[-1])),
        )
        return tuple(found)


def _share_specs(update: Partial) -> Any:
    """Specs of a Partial whose summands are the devices' shares."""
    bias = None if update.bias is None else _WHOLE
    return Partial(_SHARES, bias, update.dtype)  # type: ignore[arg-type]


def _peer_specs(peers: Peers | None) -> Any:
    return None if peers is None else Peers(_SHARES, _SHARES, peers.capacity)  # type: ignore[arg-type]


def _lookup(table: Float[Array, "V D"], tokens: Int[Array, " T"]) -> Float32[Array, "1 T D"]:
    """The embeddings of the tokens in this device's part of the table, zeros for the others."""
    rows, devices = len(table), jax.lax.axis_size(TENSOR_AXIS)
    local = jnp.clip(tokens, 0, rows * devices - 1) - jax.lax.axis_index(TENSOR_AXIS) * rows
    inside = (local >= 0) & (local < rows)
    found = jnp.take(table, jnp.where(inside, local, 0), axis=0)
    return jnp.where(inside[:, None], found, 0).astype(jnp.float32)[None]
