"""The interface of the programs that make parameters."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

type Blocks = tuple[tuple[jax.ShapeDtypeStruct, ...], ...]
"""Shape, dtype and sharding of the blocks of each tensor."""

type BlockArrays = tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """An array that a program makes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding


class ArrayProgram(abc.ABC):
    """Makes parameters of the arrays of blocks.

    Programs are hashable and compare by value (frozen dataclasses): equal ones are compiled once.

    Attributes:
        blocks: shape, dtype and sharding of the blocks of each tensor that the program takes.
    """

    blocks: Blocks

    @abc.abstractmethod
    def trace(self, tensors: BlockArrays) -> tuple[jax.Array, ...]:
        """The parameters from the blocks of each tensor; traced."""

    @property
    @abc.abstractmethod
    def shardings(self) -> tuple[Sharding, ...]:
        """Shardings of the parameters, in order."""

    @property
    def results(self) -> tuple[Result, ...]:
        """Shape, dtype and sharding of each parameter, in order."""
        found = jax.eval_shape(self.trace, self.blocks)
        return tuple(
            Result(array.shape, np.dtype(array.dtype), sharding)
            for array, sharding in zip(found, self.shardings, strict=True)
        )

    def compile(self, memory: tuple[jax.Array, ...] = ()) -> None:
        """Compile the program, so that calls with such ``memory`` find it."""
        abstract = tuple(
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for array in memory
        )
        _run.lower(self.blocks, abstract, self).compile()

    def __call__(
        self, arrays: Sequence[jax.Array], memory: tuple[jax.Array, ...] = ()
    ) -> tuple[jax.Array, ...]:
        """The parameters from the arrays of all blocks in order, dispatched asynchronously.

        Args:
            arrays: the device arrays of the blocks, in order.
            memory: device memory from `reserve`, which the results take; empty for new memory.
        """
        remaining = iter(arrays)
        tensors = [tuple(itertools.islice(remaining, len(blocks))) for blocks in self.blocks]
        return _run(tuple(tensors), memory, self)


@functools.partial(
    jax.jit, static_argnames=("program",), donate_argnames=("memory",), keep_unused=True
)
def _run(
    tensors: BlockArrays, memory: tuple[jax.Array, ...], program: ArrayProgram
) -> tuple[jax.Array, ...]:
    del memory
    return program.trace(tensors)


def reserve(programs: Sequence[ArrayProgram]) -> list[tuple[jax.Array, ...]]:
    """Device memory for the results of each program: arrays that its call donates."""
    of_program = {program: program.results for program in programs}
    flat = iter(_zeros(tuple(itertools.chain(*(of_program[program] for program in programs)))))
    return [tuple(itertools.islice(flat, len(of_program[program]))) for program in programs]


@functools.partial(jax.jit, static_argnames=("results",))
def _zeros(results: tuple[Result, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        jax.lax.with_sharding_constraint(jnp.zeros(result.shape, result.dtype), result.sharding)
        for result in results
    )
