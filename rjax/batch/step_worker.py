"""The interface through which the engine drives a worker."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8, UInt32

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.kernel_use import KernelUse
from rjax.batch.page_operations import PageOperation
from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence
from rjax.batch.step_readout import StepReadout
from rjax.sampling import SlotRow

SLEEP_TAGS = ("weights", "kv_cache")
"""What a sleeping worker has given back, and wakes up one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatePoolSize:
    """Size of the pool of states, of a model with layers that have a state in place of KV.

    Attributes:
        num_states: number of state pages.
        state_bytes: bytes of one over all layers.
        snapshot_pages: pages of tokens between two snapshots.
        tail_bytes: bytes over all layers of what a slot has of the tokens since a page's end.
    """

    num_states: int
    state_bytes: int
    snapshot_pages: int
    tail_bytes: int

    @property
    def host_bytes(self) -> int:
        """Bytes of a swapped sequence's state and tail."""
        return self.state_bytes + self.tail_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSize:
    """Size of the KV pool.

    Attributes:
        num_pages: number of pages of all page groups together.
        page_bytes: bytes of one page over the layers of a page group, K and V together.
        windows: sliding window of each page group, in tokens; None without end.
        states: size of the pool of states; None for a model without.
    """

    num_pages: int
    page_bytes: int
    windows: tuple[int | None, ...]
    states: StatePoolSize | None = None


@runtime_checkable
class StepWorker(Protocol):
    """Runs steps for the engine; `rjax.worker.worker.Worker` runs them on devices.

    It knows no requests, only scheduled sequences and pages.

    Attributes:
        pool: size of the KV pool.
        num_host_pages: pages of host memory for swapped sequences.
        num_host_states: swapped sequences whose states host memory holds.
        num_decode_steps: decode steps of one program at most.
    """

    pool: PoolSize
    num_host_pages: int
    num_host_states: int
    num_decode_steps: int

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Dtype of the KV pool."""
        ...

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page as ``read_pages`` returns it: (pools, K, S, H)."""
        ...

    def fingerprint(self) -> str:
        """Identifies the model by its configuration and its weights."""
        ...

    def check_weights(self, tensors: Mapping[str, Any], *, partial: bool) -> Any:
        """Check new weights, a `rjax.models.adopting.staged.StagedTensor` by name, against the
        model; nothing is changed.

        Returns:
            What `adopt_weights` takes, once.

        Raises:
            CheckpointError: they do not fit; the message says which and why.
        """
        ...

    def adopt_weights(self, update: Any) -> None:
        """Replace the weights for all steps that are dispatched from now on."""
        ...

    def kernels(self) -> list[KernelUse]:
        """The kernel of each operation at each step size."""
        ...

    def compile_progress(self) -> CompileProgress:
        """Progress of the compilation; any thread may call this."""
        ...

    def close(self) -> None:
        """Stop compiling in the background; wait for what the device has yet to compute."""
        ...

    def sleep(self, level: int) -> None:
        """Give back the memory of the pools, the states and the slots, all of whose content is
        lost, and that of the weights. No step, page or state is read or written until `wake_up`.

        Args:
            level: 1 copies the weights to host memory, 2 drops them.

        Raises:
            OutOfMemoryError: the host has no memory for the weights; nothing is given back.
        """
        ...

    def wake_up(self, tag: str) -> None:
        """Take the memory of one of `SLEEP_TAGS` again: weights as they were at level 1, and those
        of the checkpoint after level 2; or empty pools, states and slots.

        Raises:
            OutOfMemoryError: the devices have no memory for it; what was awake stays so.
            InvalidConfigError: the checkpoint does not hold the same model any more.
        """
        ...

    def measure_page_seconds(self) -> float:
        """Measure the seconds that one page takes to the host or back."""
        ...

    def read_pages(self, pages: list[int]) -> np.ndarray:
        """The KV in these pages, [X, pools, K, S, H]."""
        ...

    def write_pages(self, pages: list[int], data: np.ndarray) -> None:
        """Write KV of the form of ``read_pages`` into these pages."""
        ...

    def read_state(self, page: int) -> UInt8[np.ndarray, " X"]:
        """The bytes of a state page."""
        ...

    def write_state(self, page: int, data: UInt8[np.ndarray, " X"]) -> None:
        """Write bytes of the form of ``read_state`` into a state page."""
        ...

    def admit(self, rows: Mapping[int, SlotRow]) -> None:
        """Fill slots of the sampling state for new sequences, replacing all of them."""
        ...

    def move(self, operations: list[PageOperation]) -> None:
        """Start these copies of pages, in their order, before the next step."""
        ...

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a sequence makes no step wait for the compiler but for the step itself.

        Missing programs are compiled next. Programs that cannot be compiled are not waited for.
        """
        ...

    def dispatch(
        self,
        batch: list[ScheduledSequence],
        tables: Int[np.ndarray, "groups slots pages"],
        *,
        may_queue: bool,
        streams: bool,
    ) -> DispatchedStep:
        """Start a step and return at once.

        If a token mask restricts one of its samples, only its forward program starts, and `sample`
        completes it.

        Args:
            batch: the scheduled sequences in any order; the result has the step's own order.
            tables: page table of each page group; row s lists the pages of the sequence in slot s.
            may_queue: whether decode steps of one shape may start ``num_decode_steps`` at a time,
                or as soon as anything else is to be done.
            streams: whether some request is to get each token at once.
        """
        ...

    def sample(
        self, step: DispatchedStep, bitmasks: Mapping[int, UInt32[np.ndarray, " W"]]
    ) -> DispatchedStep:
        """Sample a forward-only step, under the bitmasks of these rows; others are free."""
        ...

    def read(self, step: DispatchedStep) -> StepReadout:
        """Wait for a step and copy its result to the host."""
        ...
