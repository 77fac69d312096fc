"""The compiled programs of an engine."""

import jax

from rjax.worker.compilation_cache import without_cache
from rjax.worker.lowering import ProgramLowering
from rjax.worker.program_store import ProgramStore
from rjax.worker.programs import ProgramKey


class CompiledPrograms:
    """Programs of steps, compiled once in a process and kept on disk.

    It holds no array of the engine. Any thread may call the methods.

    Args:
        lowering: lowers and compiles the programs.
        store: where they are kept between runs; None keeps none.
    """

    def __init__(self, lowering: ProgramLowering, store: ProgramStore | None) -> None:
        self._lowering = lowering
        self._store = store
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        """The program; compiled now if it is neither in memory nor on disk."""
        if key not in self._compiled and not self.load(key):
            self.compile(key, self.lower(key))
        return self._compiled[key]

    def load(self, key: ProgramKey) -> bool:
        """Load the program from disk; return whether it is there."""
        program = self._store.load(key) if self._store is not None else None
        if program is not None:
            self._compiled[key] = program
        return program is not None

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace and lower the program."""
        return self._lowering.lower(key)

    def compile(self, key: ProgramKey, lowered: jax.stages.Lowered) -> None:
        """Compile the program, and keep it."""
        if self._store is None:
            self._compiled[key] = self._lowering.compile(lowered)
        else:
            self._compiled[key] = self.keep(key, lowered)

    def keep(self, key: ProgramKey, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the program for the store, which must be there, and not for this process."""
        assert self._store is not None
        # XLA cannot write a program that JAX's cache has read; nor should both keep it.
        with without_cache():
            program = self._lowering.compile(lowered)
        self._store.save(key, program)
        return program
