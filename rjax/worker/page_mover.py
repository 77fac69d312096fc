"""Copies of whole pages: within the pool, to host memory and back, many in one operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rjax.engine.page_operations import CopyPages, PageOperation, SwapIn, SwapOut

type Pools = list[Float[Array, "P K S H"]]

_MOST_PAGES = 64  # moved by one operation; bounds the device memory it takes for a moment


@functools.partial(jax.jit, donate_argnums=0)
def _copy(pools: Pools, source: Int[Array, " X"], target: Int[Array, " X"]) -> Pools:
    return [pool.at[target].set(pool[source], mode="drop") for pool in pools]


@jax.jit
def _gather(pools: Pools, pages: Int[Array, " X"]) -> Float[Array, "X pools K S H"]:
    return jnp.stack([pool[pages] for pool in pools], 1)


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(pools: Pools, pages: Int[Array, " X"], data: Float[Array, "X pools K S H"]) -> Pools:
    return [pool.at[pages].set(data[:, i], mode="drop") for i, pool in enumerate(pools)]


class PageMover:
    """Moves pages between the pools of all layers and a pool of host memory.

    Operations are dispatched in order and return at once; what goes to the host is on its way while
    later steps run, and is waited for only when it is wanted again. Index lists are padded to
    powers of two, so that a handful of compiled programs serve everything.

    Args:
        num_pages: of the device pool.
        shape: of one page in one pool, (K, S, H).
        num_pools: K and V of all layers.
        num_slots: pages of host memory; it is taken from the system as it is first used.
        dtype: of the pools.
        mesh: the pools are cut over K on its axis ``tensor``.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        shape: tuple[int, int, int],
        num_pools: int,
        num_slots: int,
        dtype: jnp.dtype,
        mesh: Mesh,
    ) -> None:
        self._num_pages = num_pages
        self._shape = (num_pools, *shape)
        self._host = np.empty((num_slots, *self._shape), dtype)
        self._sharding = NamedSharding(mesh, PartitionSpec(None, None, "tensor", None, None))
        self._pending: list[tuple[list[int], Array]] = []

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page in all pools, (pools, K, S, H)."""
        return self._shape

    def run(self, pools: Pools, operations: list[PageOperation]) -> Pools:
        """Dispatch the operations; ``pools`` is donated where they write."""
        for operation in operations:
            match operation:
                case CopyPages(source, target):
                    pools = _copy(pools, _indices(source, 0), _indices(target, self._num_pages))
                case SwapOut(pages, slots):
                    self._out(pools, pages, slots)
                case SwapIn(slots, pages):
                    self._settle()
                    pools = self.write(pools, pages, self._host[slots])
        return pools

    def warmup(self, pools: Pools) -> Pools:
        """Compile the copies of every size; nothing is written."""
        size = 1
        while size <= _MOST_PAGES:
            nowhere = np.full(size, self._num_pages, np.int32)
            pools = _copy(pools, np.zeros(size, np.int32), nowhere)
            if len(self._host):
                block = np.zeros((size, *self._shape), self._host.dtype)
                _gather(pools, np.zeros(size, np.int32))
                pools = _scatter(pools, nowhere, jax.device_put(block, self._sharding))
            size *= 2
        return pools

    def read(self, pools: Pools, pages: list[int]) -> Float[np.ndarray, "X pools K S H"]:
        """The content of pages."""
        parts = [_gather(pools, _indices(part, 0)) for part in _parts(pages)]
        found = [np.asarray(p)[: len(part)] for p, part in zip(parts, _parts(pages), strict=True)]
        return np.concatenate(found) if found else np.empty((0, *self._shape), self._host.dtype)

    def write(
        self, pools: Pools, pages: list[int], data: Float[np.ndarray, "X pools K S H"]
    ) -> Pools:
        """Put content into pages; ``pools`` is donated."""
        start = 0
        for part in _parts(pages):
            indices = _indices(part, self._num_pages)
            block = np.zeros((indices.size, *self._shape), self._host.dtype)
            block[: len(part)] = data[start : start + len(part)]
            pools = _scatter(pools, indices, jax.device_put(block, self._sharding))
            start += len(part)
        return pools

    def _out(self, pools: Pools, pages: list[int], slots: list[int]) -> None:
        for part, where in zip(_parts(pages), _parts(slots), strict=True):
            if len(self._pending) > 1:
                self._settle_first()  # no more than two are held on the device
            data = _gather(pools, _indices(part, 0))
            data.copy_to_host_async()
            self._pending.append((where, data))

    def _settle(self) -> None:
        while self._pending:
            self._settle_first()

    def _settle_first(self) -> None:
        slots, data = self._pending.pop(0)
        self._host[slots] = np.asarray(data)[: len(slots)]


def _parts(values: list[int]) -> list[list[int]]:
    return [values[i : i + _MOST_PAGES] for i in range(0, len(values), _MOST_PAGES)]


def _indices(values: list[int], fill: int) -> Int[np.ndarray, " X"]:
    out = np.full(1 << (len(values) - 1).bit_length(), fill, np.int32)
    out[: len(values)] = values
    return out
