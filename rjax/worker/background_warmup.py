"""Compiles the programs of an engine while it runs, and finds what can run already."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from rjax.batch.compile_progress import CompileProgress
from rjax.sampling import Admission
from rjax.worker.background_compiler import BackgroundCompiler, CompileTask
from rjax.worker.compile_process import CompileLane
from rjax.worker.compiled_programs import CompiledPrograms
from rjax.worker.programs import ProgramKey, keys_of_step
from rjax.worker.step_shape import StepFeatures, StepShape


class BackgroundWarmup:
    """The warm-up of a worker. It holds no device memory.

    Args:
        programs: programs of the steps.
        keys: keys of the programs to compile, in this order.
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
        """The first shape whose programs are compiled.

        Args:
            fitting: shapes that hold the batch, the best one first. While its programs are
                compiled, another one serves, within ``max_padding``; if none is compiled, this
                waits.
            features: the step's features.
        """
        missing = [
            key for key in keys_of_step(fitting[0], features) if not self._compiler.is_compiled(key)
        ]
        if not missing:
            return fitting[0]
        for key in missing:  # not all prompt logprobs are planned
            self._add(key)
        most = self._max_padding * fitting[0].rows
        fitting = [shape for shape in fitting if shape.rows <= most]
        sets = [keys_of_step(shape, features) for shape in fitting]
        return fitting[self._compiler.first_compiled(sets)]

    def is_ready(self, shape: StepShape, features: StepFeatures) -> bool:
        """Whether what a step runs beside its step program is compiled, or cannot be.

        What is missing is compiled next.
        """
        keys = [key for key in keys_of_step(shape, features) if key.kind != "step"]
        if all(map(self._compiler.is_compiled, keys)):
            return True
        for key in keys:
            self._add(key)
        return self._compiler.hurry(keys)

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
        """How far compilation is; any thread may call this."""
        return self._compiler.progress()

    def close(self) -> None:
        """Compile nothing more."""
        self._compiler.close()

    def _add(self, key: ProgramKey) -> None:
        programs = self._programs
        task = CompileTask(
            lower=functools.partial(programs.lower, key),
            compile=functools.partial(programs.compile, key),
            load=functools.partial(programs.load, key),
            beside=True,
        )
        self._compiler.add(key, task)
