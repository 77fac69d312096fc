"""Copies of arrays to page-locked host memory and back."""

from collections import deque
from typing import Any

import jax
from jax.sharding import NamedSharding

from rjax.errors import InvalidConfigError, OutOfMemoryError

_HOST_KIND = "pinned_host"


def host_sharding(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in the page-locked host memory of each device.

    Raises:
        InvalidConfigError: a device reaches no such memory.
    """
    for device in sharding.device_set:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if _HOST_KIND not in kinds:
            raise InvalidConfigError(
                f"{device} reaches no page-locked host memory to swap pages to, only {kinds}; "
                "set swap_space=0"
            )
    return sharding.with_memory_kind(_HOST_KIND)


def to_host[T](arrays: T, sharding: Any) -> T:
    """Start the copies of arrays to the host; ``sharding`` is one, or one for each array.

    Raises:
        OutOfMemoryError: the system or XLA's limit allows no more page-locked memory.
    """
    try:
        return jax.device_put(arrays, sharding)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"no page-locked host memory for the pages to swap out ({error}); lower swap_space,"
            " or raise what XLA takes of it: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, in GiB, is 64"
            " unless it is set"
        ) from error


class CopiesInFlight:
    """The copies between device and host that are under way: they hold device memory meanwhile.

    Args:
        most: how many may be under way.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._copies: deque[list[Any]] = deque()  # of arrays, whose type lacks is_ready

    def wait_for_room(self) -> None:
        """Wait until one more copy may start."""
        copies = self._copies
        while copies and (
            len(copies) >= self._most or all(array.is_ready() for array in copies[0])
        ):
            jax.block_until_ready(copies.popleft())

    def wait_for_all(self) -> None:
        """Wait until none is under way."""
        while self._copies:
            jax.block_until_ready(self._copies.popleft())

    def add(self, copies: list[Any]) -> None:
        """Note copies that have started together."""
        self._copies.append(copies)
