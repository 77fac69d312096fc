"""Copies of whole pages: within the pool, to host memory and back, many in one operation."""

import functools
import math
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rjax.batch.page_operations import CopyPages, PageOperation, SwapIn, SwapOut
from rjax.errors import InvalidConfigError, OutOfMemoryError
from rjax.worker.compile_ahead import compile_ahead

type Pools = list[Float[Array, "P K S H"]]
type Page = Float[Array, "pools K S H"]

_MOST_PAGES = 64  # moved by one program,
_MOST_BYTES = 2**28  # if they are no more than this,
_MOST_UNDER_WAY = 4  # and between device and host at a time: they take device memory until then
_TIMED_PAGES = 8
_HOST_KIND = "pinned_host"


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

    Operations are dispatched in order and return at once. What is swapped out is gathered into
    arrays of its own, one a page, and these are copied to page-locked host memory beside the steps
    that follow; what is swapped in takes the opposite way. The device keeps the order: the gather
    reads the pool as the steps before it left it, a copy waits for its source. The host waits only
    where too much is under way. Index lists are padded to powers of two, so that a handful of
    compiled programs serve everything; the copies need no program.

    Args:
        num_pages: of the device pool.
        shape: of one page in one pool, (K, S, H).
        num_pools: K and V of all layers.
        num_slots: pages of host memory; a slot's memory is taken as it is first used, and kept.
            Together they take no more than their pages, besides what is under way.
        dtype: of the pools.
        mesh: the pools are cut over K on its axis ``tensor``.

    Raises:
        InvalidConfigError: there are slots, and the devices reach no page-locked host memory.
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
        self._most = 1 << (max(1, min(_MOST_PAGES, _MOST_BYTES // page_bytes)).bit_length() - 1)
        self._on_device = NamedSharding(mesh, PartitionSpec(None, "tensor", None, None))
        self._on_host = _host_sharding(self._on_device) if num_slots else None
        self._slots: dict[int, Page] = {}
        self._under_way: deque[list[Any]] = deque()  # of arrays, whose type lacks is_ready

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of one page in all pools, (pools, K, S, H)."""
        return self._shape

    def run(self, pools: Pools, operations: list[PageOperation]) -> Pools:
        """Dispatch the operations; ``pools`` is donated where they write.

        Raises:
            OutOfMemoryError: the system, or XLA, gives no more page-locked memory.
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

    def warmup(self, pools: Pools, *, progress: bool) -> Pools:
        """Compile the copies of every size; nothing is written."""
        page = self._empty_page()
        programs = []
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            programs.append(_copy.lower(pools, some, nowhere))
            if self._on_host:
                programs.append(_gather.lower(pools, some, self._on_device))
                programs.append(_scatter.lower(pools, nowhere, [page] * size))
        compile_ahead(programs, len(programs), title="Compiling copies", progress=progress)
        for size in self._sizes():
            some, nowhere = np.zeros(size, np.int32), np.full(size, self._num_pages, np.int32)
            pools = _copy(pools, some, nowhere)
            if self._on_host:
                away = self._to_host(_gather(pools, some, self._on_device))
                pools = _scatter(pools, nowhere, self._to_device(away))
        return pools

    def page_seconds(self) -> float:
        """Time that one page takes to the host or back, as this machine does it now; 0 if there
        are no slots for it."""
        if not self._on_host:
            return 0.0
        pages, taken = [self._empty_page()] * _TIMED_PAGES, []
        for _ in range(2):  # the first takes memory from the system
            start = time.perf_counter()
            jax.block_until_ready(self._to_device(self._to_host(pages)))
            taken.append(time.perf_counter() - start)
        return taken[-1] / (2 * _TIMED_PAGES)

    def read(self, pools: Pools, pages: list[int]) -> Float[np.ndarray, "X pools K S H"]:
        """The content of pages."""
        found = np.empty((len(pages), *self._shape), self._dtype)
        start = 0
        for part in self._parts(pages):
            data = _gather(pools, _indices(part, 0), self._on_device)[: len(part)]
            for page in data:
                page.copy_to_host_async()
            for i, page in enumerate(data, start):
                found[i] = page
            start += len(part)
        return found

    def write(
        self, pools: Pools, pages: list[int], data: Float[np.ndarray, "X pools K S H"]
    ) -> Pools:
        """Put content into pages; ``pools`` is donated."""
        start = 0
        for part in self._parts(pages):
            given = jax.device_put(list(data[start : start + len(part)]), self._on_device)
            pools = self._put(pools, part, given)
            start += len(part)
        return pools

    def _copy(self, pools: Pools, source: list[int], target: list[int]) -> Pools:
        # No part reads what one before it has written: PageOperations sees to that.
        for part, where in zip(self._parts(source), self._parts(target), strict=True):
            pools = _copy(pools, _indices(part, 0), _indices(where, self._num_pages))
        return pools

    def _out(self, pools: Pools, pages: list[int], slots: list[int]) -> None:
        for part, where in zip(self._parts(pages), self._parts(slots), strict=True):
            self._wait_for_room()
            for slot in where:
                self._slots.pop(slot, None)  # its memory serves what comes
            away = self._to_host(_gather(pools, _indices(part, 0), self._on_device)[: len(part)])
            self._under_way.append(away)
            self._slots.update(zip(where, away, strict=True))

    def _in(self, pools: Pools, slots: list[int], pages: list[int]) -> Pools:
        for part, where in zip(self._parts(pages), self._parts(slots), strict=True):
            self._wait_for_room()
            back = self._to_device([self._slots[slot] for slot in where])
            self._under_way.append(back)
            pools = self._put(pools, part, back)
        return pools

    def _put(self, pools: Pools, pages: list[int], data: list[Page]) -> Pools:
        indices = _indices(pages, self._num_pages)
        return _scatter(pools, indices, data + data[:1] * (indices.size - len(data)))

    def _to_host(self, pages: list[Page]) -> list[Page]:
        try:
            return jax.device_put(pages, self._on_host)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(
                f"no page-locked host memory for the pages to swap out ({error}); lower swap_space,"
                " or raise what XLA takes of it: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, in GiB, is 64"
                " unless it is set"
            ) from error

    def _to_device(self, pages: list[Page]) -> list[Page]:
        return jax.device_put(pages, self._on_device)

    def _wait_for_room(self) -> None:
        way = self._under_way
        while way and (len(way) >= _MOST_UNDER_WAY or all(page.is_ready() for page in way[0])):
            jax.block_until_ready(way.popleft())

    def _sizes(self) -> list[int]:
        """Pages of each compiled copy."""
        return [1 << i for i in range(self._most.bit_length())]

    def _empty_page(self) -> Page:
        return jax.device_put(np.zeros(self._shape, self._dtype), self._on_device)

    def _parts(self, values: list[int]) -> list[list[int]]:
        return [values[i : i + self._most] for i in range(0, len(values), self._most)]


def _host_sharding(sharding: NamedSharding) -> NamedSharding:
    """The same cut in the page-locked host memory of each device."""
    for device in sharding.device_set:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if _HOST_KIND not in kinds:
            raise InvalidConfigError(
                f"{device} reaches no page-locked host memory to swap pages to, only {kinds}; "
                "set swap_space=0"
            )
    return sharding.with_memory_kind(_HOST_KIND)


def _indices(values: list[int], fill: int) -> Int[np.ndarray, " X"]:
    out = np.full(1 << (len(values) - 1).bit_length(), fill, np.int32)
    out[: len(values)] = values
    return out
