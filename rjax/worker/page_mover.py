"""Copies of whole pages: within the pool, to host memory and back, many in one operation."""

import functools
import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from rjax.engine.page_operations import CopyPages, PageOperation, SwapIn, SwapOut
from rjax.worker.compile_ahead import compile_ahead

type Pools = list[Float[Array, "P K S H"]]

_MOST_PAGES = 64  # moved by one program,
_MOST_BYTES = 2**28  # if they are no more than this,
_MOST_PENDING = 4  # and on their way to the host at a time: they take device memory until then


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

    Operations are dispatched in order and return at once. What goes to the host is on its way while
    later steps run: a thread of its own waits for it and puts it into place, and an operation waits
    for that thread only where it wants the very pages, or where too many are on their way. Index
    lists are padded to powers of two, so that a handful of compiled programs serve everything.

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
        self._dtype = jnp.dtype(dtype)
        # As bytes: NumPy copies what it has no type for, bfloat16, with the interpreter's lock.
        page_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._host = np.empty((num_slots, page_bytes), np.uint8)
        self._most = 1 << (max(1, min(_MOST_PAGES, _MOST_BYTES // page_bytes)).bit_length() - 1)
        self._sharding = NamedSharding(mesh, PartitionSpec(None, None, "tensor", None, None))
        self._keeper = ThreadPoolExecutor(1, "rjax-swap-out")
        self._pending: deque[tuple[frozenset[int], Future[None]]] = deque()

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page in all pools, (pools, K, S, H)."""
        return self._shape

    def run(self, pools: Pools, operations: list[PageOperation]) -> Pools:
        """Dispatch the operations; ``pools`` is donated where they write."""
        for operation in operations:
            match operation:
                case CopyPages(source, target):
                    pools = self._copy(pools, source, target)
                case SwapOut(pages, slots):
                    self._out(pools, pages, slots)
                case SwapIn(slots, pages):
                    pools = self._in(pools, slots, pages)
        return pools

    def warmup(self, pools: Pools, *, progress: bool) -> Pools:
        """Compile the copies of every size; nothing is written."""
        programs = []
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            programs.append(_copy.lower(pools, some, nowhere))
            if len(self._host):
                programs.append(_gather.lower(pools, some))
                programs.append(_scatter.lower(pools, nowhere, self._block(size)))
        compile_ahead(programs, len(programs), title="Compiling copies", progress=progress)
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            pools = _copy(pools, some, nowhere)
            if len(self._host):
                _gather(pools, some)
                pools = _scatter(pools, nowhere, self._block(size))
        return pools

    def _sizes(self) -> list[int]:
        """Pages of each compiled copy."""
        return [1 << i for i in range(self._most.bit_length())]

    def _block(self, size: int) -> Array:
        """So many empty pages on the device."""
        return jax.device_put(np.zeros((size, *self._shape), self._dtype), self._sharding)

    def read(self, pools: Pools, pages: list[int]) -> Float[np.ndarray, "X pools K S H"]:
        """The content of pages."""
        parts = [_gather(pools, _indices(part, 0)) for part in self._parts(pages)]
        found = [
            np.asarray(p)[: len(part)] for p, part in zip(parts, self._parts(pages), strict=True)
        ]
        return np.concatenate(found) if found else np.empty((0, *self._shape), self._dtype)

    def write(
        self, pools: Pools, pages: list[int], data: Float[np.ndarray, "X pools K S H"]
    ) -> Pools:
        """Put content into pages; ``pools`` is donated."""
        start = 0
        for part in self._parts(pages):
            indices = _indices(part, self._num_pages)
            block = np.zeros((indices.size, *self._shape), self._dtype)
            block[: len(part)] = data[start : start + len(part)]
            pools = _scatter(pools, indices, jax.device_put(block, self._sharding))
            start += len(part)
        return pools

    def _copy(self, pools: Pools, source: list[int], target: list[int]) -> Pools:
        # No part reads what one before it has written: PageOperations sees to that.
        for part, where in zip(self._parts(source), self._parts(target), strict=True):
            pools = _copy(pools, _indices(part, 0), _indices(where, self._num_pages))
        return pools

    def _out(self, pools: Pools, pages: list[int], slots: list[int]) -> None:
        for part, where in zip(self._parts(pages), self._parts(slots), strict=True):
            while len(self._pending) >= _MOST_PENDING:
                self._settle_first()
            data = _gather(pools, _indices(part, 0))
            data.copy_to_host_async()
            self._pending.append((frozenset(where), self._keeper.submit(self._keep, where, data)))

    def _in(self, pools: Pools, slots: list[int], pages: list[int]) -> Pools:
        wanted = frozenset(slots)
        while any(not wanted.isdisjoint(where) for where, _ in self._pending):
            self._settle_first()
        for part, where in zip(self._parts(pages), self._parts(slots), strict=True):
            indices = _indices(part, self._num_pages)
            block = np.empty((indices.size, self._host.shape[1]), np.uint8)  # the rest is dropped
            np.take(self._host, where, 0, block[: len(where)], mode="clip")
            data = block.view(self._dtype).reshape(-1, *self._shape)
            pools = _scatter(pools, indices, jax.device_put(data, self._sharding))
        return pools

    def _keep(self, slots: list[int], data: Array) -> None:
        """Wait until pages are on the host, and put them into their slots."""
        for slot, page in zip(slots, _bytes_of(data), strict=False):
            self._host[slot] = page

    def _parts(self, values: list[int]) -> list[list[int]]:
        return [values[i : i + self._most] for i in range(0, len(values), self._most)]

    def _settle_first(self) -> None:
        _, done = self._pending.popleft()
        done.result()


def _bytes_of(data: Float[Array, "X pools K S H"]) -> UInt8[np.ndarray, "X bytes"]:
    """Wait for pages and give the bytes of each."""
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)


def _indices(values: list[int], fill: int) -> Int[np.ndarray, " X"]:
    out = np.full(1 << (len(values) - 1).bit_length(), fill, np.int32)
    out[: len(values)] = values
    return out
