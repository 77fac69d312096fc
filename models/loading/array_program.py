"""The interface of the programs that make parameters."""

import abc
from collections.abc import Sequence

import jax


class ArrayProgram(abc.ABC):
    """Makes parameters of the arrays of blocks.

    Programs are hashable and compare by value (frozen dataclasses): equal ones are compiled once.
    """

    @abc.abstractmethod
    def compile(self) -> None:
        """Compile the program, so that calls find it."""

    @abc.abstractmethod
    def __call__(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The parameters from the arrays of all blocks in order, dispatched asynchronously."""
