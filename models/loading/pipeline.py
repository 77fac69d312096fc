"""Threads that load parameters: reading, copying to devices and assembling overlap."""

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import jax

from rjax.models.loading.assembly import Assembly, reserve
from rjax.models.loading.blocks import Block

_READ_THREADS = 8
_COMPILE_THREADS = 4


type Load = Callable[[Block, Callable[[], None]], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlan:
    """How one parameter is loaded, or several that are made of the same tensors.

    Attributes:
        blocks: the blocks that are read and copied to the devices.
        assembly: makes the parameters of their arrays; None if the array of the only block is one.
    """

    blocks: tuple[Block, ...]
    assembly: Assembly | None = None

    @property
    def size(self) -> int:
        """Bytes in the files."""
        return sum(block.size for block in self.blocks)


class _Loading:
    """A parameter of which some blocks are loaded, until it is assembled."""

    def __init__(self, plan: ParameterPlan, memory: tuple[jax.Array, ...]) -> None:
        self.plan = plan
        self.memory = memory
        self.arrays: dict[int, jax.Array] = {}
        self.value: tuple[jax.Array, ...] | None = None


class _StoppedError(Exception):
    pass


class Pipeline:
    """Load parameters on several threads, and yield those of each plan, ready, in order.

    Each thread takes the next block, reads it and copies it to the devices; the thread with the
    last block of a parameter assembles it. So the disk, the copies and the devices are all busy.
    Other threads compile the programs that assemble meanwhile.

    Bytes in flight are those of blocks that a thread has taken and whose parameter was not yielded
    yet. No block is taken that would make them exceed both ``ahead_bytes`` and the size of the next
    two parameters to be yielded.

    Iterate inside ``with``: leaving it stops and joins the threads, also after an error.

    Args:
        plans: the parameters in the order of loading.
        load: reads a block and returns its array, ready. It calls the function that it is given
            now and then, which raises when the pipeline is stopped.
        ahead_bytes: see above; with 0, only the next two parameters are loaded.
        reserves: take the device memory of all assembled parameters first. Otherwise they fill the
            gaps that blocks left, which an allocator rounds up: a parameter that takes a gap of
            less than twice its size wastes the rest.

    Raises (while iterating):
        Exception: the first exception of a thread.
    """

    def __init__(
        self,
        plans: Sequence[ParameterPlan],
        load: Load,
        ahead_bytes: int,
        *,
        reserves: bool = False,
    ) -> None:
        self._load, self._ahead_bytes = load, ahead_bytes
        assembled = [plan.assembly for plan in plans if plan.assembly is not None]
        memory = iter(reserve(assembled) if reserves else [()] * len(assembled))
        self._parameters = collections.deque(
            _Loading(plan, () if plan.assembly is None else next(memory)) for plan in plans
        )
        self._blocks = collections.deque(
            (parameter, i)
            for parameter in self._parameters
            for i in range(len(parameter.plan.blocks))
        )
        self._in_flight = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._changed = threading.Condition()
        programs = {p.plan.assembly: p.memory for p in self._parameters if p.plan.assembly}
        self._programs = collections.deque(programs.items())
        self._threads = [
            *(self._thread(self._compile) for _ in range(min(_COMPILE_THREADS, len(programs)))),
            *(self._thread(self._read) for _ in range(min(_READ_THREADS, len(self._blocks)))),
        ]

    def __enter__(self) -> "Pipeline":
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def __iter__(self) -> Iterator[tuple[jax.Array, ...]]:
        while self._parameters:
            parameter = self._parameters[0]
            with self._changed:
                self._changed.wait_for(lambda p=parameter: p.value is not None or self._error)
                if self._error is not None:
                    raise self._error
            assert parameter.value is not None
            value = jax.block_until_ready(parameter.value)
            with self._changed:
                self._in_flight -= parameter.plan.size
                self._parameters.popleft()
                self._changed.notify_all()
            yield value

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        self._parameters.clear()
        self._blocks.clear()
        self._programs.clear()
        self._error = None  # its traceback refers to this pipeline

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except _StoppedError:
                pass
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._changed.notify_all()

        return threading.Thread(target=run, name="load-weights", daemon=True)

    def _compile(self) -> None:
        while not self._stopped and not self._error:
            try:
                program, memory = self._programs.popleft()
            except IndexError:
                return
            program.compile(memory)

    def _read(self) -> None:
        while (block := self._take()) is not None:
            self._load_block(*block)

    def _take(self) -> tuple[_Loading, int] | None:
        """The next block once it fits into the limit; None if there is none left."""

        def fits() -> bool:
            # Blocks are taken in order, so those of the next parameter to be yielded always fit.
            if self._stopped or self._error or not self._blocks:
                return True
            parameter, i = self._blocks[0]
            next_two = sum(p.plan.size for p in itertools.islice(self._parameters, 2))
            size = self._in_flight + parameter.plan.blocks[i].size
            return size <= max(next_two, self._ahead_bytes)

        with self._changed:
            self._changed.wait_for(fits)
            if self._stopped or self._error or not self._blocks:
                return None
            parameter, i = self._blocks.popleft()
            self._in_flight += parameter.plan.blocks[i].size
            return parameter, i

    def _load_block(self, parameter: _Loading, i: int) -> None:
        array = self._load(parameter.plan.blocks[i], self._check)
        with self._changed:
            parameter.arrays[i] = array
            del array
            if len(parameter.arrays) < len(parameter.plan.blocks):
                return
        arrays, parameter.arrays = parameter.arrays, {}
        in_order = [arrays.pop(i) for i in range(len(arrays))]
        assembly = parameter.plan.assembly
        memory, parameter.memory = parameter.memory, ()
        value = (in_order[0],) if assembly is None else assembly(in_order, memory)
        in_order.clear()
        with self._changed:
            parameter.value = value
            self._changed.notify_all()

    def _check(self) -> None:
        if self._stopped or self._error:
            raise _StoppedError
