"""The weights of a sleeping worker."""

import contextlib
from collections.abc import Callable, Iterator

import jax
from flax import nnx
from jaxtyping import Array

from rjax.errors import InvalidConfigError, OutOfMemoryError
from rjax.models import LoadedModel
from rjax.worker.programs.keys import shapes_of
from rjax.worker.step.runner import StepRunner

_HOST_KIND = "pinned_host"


class SleepingWeights:
    """Takes the weights from a runner, and gives them back to it.

    Args:
        runner: holds the weights on the devices; it has none while they sleep.
        reload: loads the model again; None if it cannot be.
    """

    def __init__(self, runner: StepRunner, reload: Callable[[], LoadedModel] | None) -> None:
        self._runner, self._reload = runner, reload
        self._shapes = shapes_of(runner.leaves)
        self._on_host: list[Array] = []

    def sleep(self, level: int) -> None:
        """Copy the weights to page-locked host memory (level 1) or drop them (level 2).

        Raises:
            OutOfMemoryError: there is no such memory; the weights stay where they are.
            InvalidConfigError: they would be dropped, and cannot be loaded again.
        """
        if level == 2:
            if self._reload is None:
                raise InvalidConfigError(
                    "this engine has no checkpoint to load again; sleep with level 1"
                )
            self._on_host = []
        elif self._runner.leaves:
            targets = [leaf.sharding.with_memory_kind(_HOST_KIND) for leaf in self._shapes]
            with out_of_memory(
                "the weights in page-locked host memory",
                "raise what XLA takes of it (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, in GiB, is 64 "
                "unless it is set), or sleep with level 2",
            ):
                self._on_host = jax.block_until_ready(jax.device_put(self._runner.leaves, targets))
        self._runner.leaves = []

    def wake_up(self) -> None:
        """Copy the weights back to the devices, or load those of the checkpoint.

        Raises:
            OutOfMemoryError: the devices have no memory for them.
            InvalidConfigError: the checkpoint holds another model now.
        """
        with out_of_memory("the weights"):
            if self._on_host:
                targets = [leaf.sharding for leaf in self._shapes]
                leaves = jax.block_until_ready(jax.device_put(self._on_host, targets))
            else:
                assert self._reload is not None
                leaves = jax.tree.leaves(nnx.split(self._reload().model)[1])
        if shapes_of(leaves) != self._shapes:
            raise InvalidConfigError(
                "the checkpoint has changed: its weights have other shapes or dtypes than those "
                "that this engine was made for; make a new engine"
            )
        self._runner.leaves, self._on_host = leaves, []


@contextlib.contextmanager
def out_of_memory(what: str, remedy: str = "free some, and wake up again") -> Iterator[None]:
    """Raise OutOfMemoryError where XLA finds no memory for ``what``."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(f"there is no memory for {what} ({error}); {remedy}") from error
