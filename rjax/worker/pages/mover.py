"""Copies pages within the pool, to host memory and back, many in one operation."""

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rjax.batch.page_operations import CopyPages, KvOperation, SwapIn, SwapOut
from rjax.worker.pages.host_memory import CopiesInFlight, host_sharding, to_host
from rjax.worker.pages.pools import Pools
from rjax.worker.programs.background_compiler import CompileTask

type Page = Float[Array, "pools K S H"]

_SIZE_RATIO = 8  # of the numbers of pages that programs copy
_MAX_PAGES = _SIZE_RATIO**2
_MAX_BYTES = 2**28  # copied by one program
_MAX_IN_FLIGHT = 4  # copies between device and host at a time: they hold device memory meanwhile
_TIMED_PAGES = 8


@functools.partial(jax.jit, donate_argnums=0)
def _copy(pools: Pools, source: Int[Array, " X"], target: Int[Array, " X"]) -> Pools:
    return [pool.at[target].set(pool[source], mode="drop") for pool in pools]


@functools.partial(jax.jit, static_argnums=2)
def _gather(pools: Pools, pages: Int[Array, " X"], sharding: NamedSharding) -> list[Page]:
    # One gather a pool and one copy a page: fused, each page would gather from every pool.
    block = jax.lax.optimization_barrier(jnp.stack([pool[pages] for pool in pools], 1))
    return [jax.lax.with_sharding_constraint(page, sharding) for page in jnp.unstack(block)]


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(pools: Pools, pages: Int[Array, " X"], data: list[Page]) -> Pools:
    block = jax.lax.optimization_barrier(jnp.stack(data))
    return [pool.at[pages].set(block[:, i], mode="drop") for i, pool in enumerate(pools)]


class PageMover:
    """Moves pages between the pools of all layers and slots of host memory.

    Operations are dispatched in order and return at once. A swap-out gathers its pages into arrays
    of their own, one a page, and copies these to page-locked host memory while later steps run; a
    swap-in does the opposite. The device keeps the order: a gather reads the pool as the steps
    before it left it, and a copy waits for its source. The host waits only if too many copies are
    in flight. Index lists are padded to powers of two, so a few compiled programs serve all sizes;
    the copies between host and device need no program.

    Args:
        num_pages: number of pages of the device pool, P.
        shape: shape of one page in one pool, (K, S, H).
        num_pools: number of K and V arrays.
        num_slots: host slots, one page each. A slot's memory is allocated at its first use and
            kept. All slots together take the memory of their pages and of the copies in flight.
        dtype: dtype of the pools.
        mesh: the devices; the pools are sharded over K on the axis ``tensor``.

    Raises:
        InvalidConfigError: there are host slots, and the devices reach no page-locked host memory.
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
        page_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._max_pages = 1 << (max(1, min(_MAX_PAGES, _MAX_BYTES // page_bytes)).bit_length() - 1)
        self._on_device = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
        self._on_host = host_sharding(self._on_device) if num_slots else None
        self._slots: dict[int, Page] = {}
        self._in_flight = CopiesInFlight(_MAX_IN_FLIGHT)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page in all pools, (pools, K, S, H)."""
        return self._shape

    def run(self, pools: Pools, operations: list[KvOperation]) -> Pools:
        """Dispatch the operations; ``pools`` is donated where they write.

        Raises:
            OutOfMemoryError: the system or XLA's limit allows no more page-locked memory.
        """
        for operation in operations:
            match operation:
                case CopyPages(source, target):
                    pools = self._copy(pools, source, target)
                case SwapOut(pages, slots):
                    self._out(pools, pages, slots)
                case SwapIn(slots, pages):
                    pools = self._in(pools, slots, pages)
        return pools

    def forget(self) -> None:
        """Free the memory of all host slots, after the copies in flight."""
        self._in_flight.wait_for_all()
        self._slots.clear()

    def warmup(self, pools: Pools) -> Pools:
        """Run the copies of every size; nothing is written."""
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            pools = _copy(pools, some, nowhere)
            if self._on_host:
                away = self._to_host(_gather(pools, some, self._on_device))
                pools = _scatter(pools, nowhere, self._to_device(away))
        return pools

    def programs(self, pools: Any) -> list[tuple[str, CompileTask]]:
        """The name of each copy's program and how it is made; those of few pages come first.

        Args:
            pools: the pools, or their shapes and shardings.
        """
        page = jax.ShapeDtypeStruct(self._shape, self._dtype, sharding=self._on_device)
        found: list[tuple[str, CompileTask]] = []
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            copy = functools.partial(_copy.lower, pools, some, nowhere)
            found.append((f"copy {size}", CompileTask(copy)))
            if self._on_host:
                gather = functools.partial(_gather.lower, pools, some, self._on_device)
                scatter = functools.partial(_scatter.lower, pools, nowhere, [page] * size)
                found.append((f"gather {size}", CompileTask(gather)))
                found.append((f"scatter {size}", CompileTask(scatter)))
        return found

    def page_seconds(self) -> float:
        """Measure the seconds that one page takes to the host or back; 0 without host slots."""
        if not self._on_host:
            return 0.0
        pages, taken = [self._empty_page()] * _TIMED_PAGES, []
        for _ in range(2):  # the first allocates memory
            start = time.perf_counter()
            jax.block_until_ready(self._to_device(self._to_host(pages)))
            taken.append(time.perf_counter() - start)
        return taken[-1] / (2 * _TIMED_PAGES)

    def read(self, pools: Pools, pages: list[int]) -> Float[np.ndarray, "X pools K S H"]:
        """The content of pages."""
        found = np.empty((len(pages), *self._shape), self._dtype)
        start = 0
        for chunk in self._chunks(pages):
            data = _gather(pools, self._indices(chunk, 0), self._on_device)[: len(chunk)]
            for page in data:
                page.copy_to_host_async()
            for i, page in enumerate(data, start):
                found[i] = page
            start += len(chunk)
        return found

    def write(
        self, pools: Pools, pages: list[int], data: Float[np.ndarray, "X pools K S H"]
    ) -> Pools:
        """Put content into pages; ``pools`` is donated."""
        start = 0
        for chunk in self._chunks(pages):
            given = jax.device_put(list(data[start : start + len(chunk)]), self._on_device)
            pools = self._put(pools, chunk, given)
            start += len(chunk)
        return pools

    def _copy(self, pools: Pools, source: list[int], target: list[int]) -> Pools:
        # `PageOperations` guarantees that no chunk reads a page that an earlier one writes.
        for read, written in zip(self._chunks(source), self._chunks(target), strict=True):
            pools = _copy(pools, self._indices(read, 0), self._indices(written, self._num_pages))
        return pools

    def _out(self, pools: Pools, pages: list[int], slots: list[int]) -> None:
        for chunk, chunk_slots in zip(self._chunks(pages), self._chunks(slots), strict=True):
            self._in_flight.wait_for_room()
            for slot in chunk_slots:
                self._slots.pop(slot, None)  # frees its memory for the new page
            away = self._to_host(
                _gather(pools, self._indices(chunk, 0), self._on_device)[: len(chunk)]
            )
            self._in_flight.add(away)
            self._slots.update(zip(chunk_slots, away, strict=True))

    def _in(self, pools: Pools, slots: list[int], pages: list[int]) -> Pools:
        for chunk, chunk_slots in zip(self._chunks(pages), self._chunks(slots), strict=True):
            self._in_flight.wait_for_room()
            back = self._to_device([self._slots[slot] for slot in chunk_slots])
            self._in_flight.add(back)
            pools = self._put(pools, chunk, back)
        return pools

    def _put(self, pools: Pools, pages: list[int], data: list[Page]) -> Pools:
        indices = self._indices(pages, self._num_pages)
        return _scatter(pools, indices, data + data[:1] * (indices.size - len(data)))

    def _to_host(self, pages: list[Page]) -> list[Page]:
        return to_host(pages, self._on_host)

    def _to_device(self, pages: list[Page]) -> list[Page]:
        return jax.device_put(pages, self._on_device)

    def _sizes(self) -> list[int]:
        """Pages of each compiled copy: each size takes longer to compile than its padding costs."""
        return sorted({min(_SIZE_RATIO**i, self._max_pages) for i in range(3)})

    def _indices(self, values: list[int], fill: int) -> Int[np.ndarray, " X"]:
        """The values, padded to the size of a compiled copy."""
        size = next(size for size in self._sizes() if len(values) <= size)
        return np.pad(np.asarray(values, np.int32), (0, size - len(values)), constant_values=fill)

    def _empty_page(self) -> Page:
        return jax.device_put(np.zeros(self._shape, self._dtype), self._on_device)

    def _chunks(self, values: list[int]) -> list[list[int]]:
        return [values[i : i + self._max_pages] for i in range(0, len(values), self._max_pages)]
