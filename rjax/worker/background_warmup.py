"""Compiles the programs of an engine while it runs, and finds what can run already."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from rjax.batch.compile_progress import CompileProgress
from rjax.sampling import Admission
from rjax.worker.background_compiler import BackgroundCompiler, CompileTask
from rjax.worker.compile_process import CompileLane
from rjax.worker.compiled_programs import CompiledPrograms
from rjax.worker.programs import ProgramKey, sampling_key, step_key
from rjax.worker.step_shape import StepFeatures, StepShape


class BackgroundWarmup:
    """The warm-up of a worker. It holds no device memory.

    Args:
        programs: of steps.
        keys: of the programs to compile, in this order.
        max_padding: a shape may serve while the best one compiles if it has at most this many
            times the rows.
        admissions: what compiles each of `rjax.sampling.ADMISSIONS`.
        copies: names of the programs that copy pages, and what compiles them.
        start_lanes: starts processes that compile programs of steps beside this one; None for none.
        progress: show a progress bar to who waits, in a terminal.
    """

    def __init__(
        self,
        programs: CompiledPrograms,
        keys: Iterable[ProgramKey],
        max_padding: float,
        *,
        admissions: Mapping[Admission, CompileTask],
        copies: Iterable[tuple[str, CompileTask]],
        start_lanes: Callable[[], Sequence[CompileLane]] | None,
        progress: bool,
    ) -> None:
        self._programs = programs
        self._max_padding = max_padding
        self._compiler = BackgroundCompiler(progress=progress, start_lanes=start_lanes)
        # Every request is admitted; the last programs serve preempted sequences.
        self._compiler.add("admit one", admissions["one"])
        self._compiler.add("admit several", admissions["several"])
        for key in keys:
            self._add(key)
        self._compiler.add("admit continued", admissions["continued"])
        for name, copy in copies:
            self._compiler.add(name, copy)

    def choose(self, fitting: list[StepShape], features: StepFeatures) -> StepShape:
        """The first shape whose step is compiled, its sampling too.

        Args:
            fitting: shapes that hold the batch, the best one first. While it is compiled, another
                one serves, within ``max_padding``; if none is compiled, this waits.
            features: of the step.
        """
        most = self._max_padding * fitting[0].rows
        fitting = [shape for shape in fitting if shape.rows <= most]
        keys = [step_key(shape, features) for shape in fitting]
        shape = fitting[self._first_compiled(keys)]
        sampling = sampling_key(shape.seqs, features)
        if sampling is not None:
            self._first_compiled([sampling])
        return shape

    def compile(self, key: ProgramKey) -> None:
        """Compile a program that is not planned, after all others."""
        self._add(key)

    def is_compiled(self, key: ProgramKey) -> bool:
        """Whether a program can run without waiting."""
        return self._compiler.is_compiled(key)

    def wait(self, *, progress: bool) -> None:
        """Wait until everything is compiled; ``progress`` shows a bar."""
        self._compiler.wait(title="Compiling steps", progress=progress)

    def progress(self) -> CompileProgress:
        """How far it is; any thread may call this."""
        return self._compiler.progress()

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()

    def _first_compiled(self, keys: list[ProgramKey]) -> int:
        if not self._compiler.is_compiled(keys[0]):
            self._add(keys[0])  # steps with prompt logprobs are not planned
        return self._compiler.first_compiled(keys)

    def _add(self, key: ProgramKey) -> None:
        programs = self._programs
        task = CompileTask(
            lower=functools.partial(programs.lower, key),
            compile=functools.partial(programs.compile, key),
            load=functools.partial(programs.load, key),
            beside=True,
        )
        self._compiler.add(key, task)
