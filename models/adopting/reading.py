"""How a checkpoint tensor is read from an array whose axes are in another order."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from rjax.models.errors import CheckpointError

_STACKS = "LJ"
"""Axis letters along which an array holds all layers, and all experts of a layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A tensor that is read from an array.

    Attributes:
        pattern: axes of the array and of the tensor in letters, with merged axes in brackets, such
            as "D N H -> (N H) D". An array with the axes L or J, which the tensor lacks, holds the
            tensors of all layers, or of all experts.
        at: (letter, index) of further axes of the array, of which one entry is read.
        sizes: (letter, size) of letters that are merged in the array, where it does not follow.
        first: (letter, count) of axes of which only the first entries are read.
        scale, offset: the values are multiplied, and then added to, in float32.
        start, step: layer i of the array, or of its name, is layer start + step * i of the model.
    """

    pattern: str
    at: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    first: tuple[tuple[str, int], ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    start: int = 0
    step: int = 1

    @property
    def stacks(self) -> str:
        """The letters of the axes that the array holds all entries of, L before J."""
        source, target = _axes(self.pattern)
        flat = {letter for group in target for letter in group}
        return "".join(one for one in _STACKS if [one] in source and one not in flat)

    def counts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Number of entries of each of ``stacks`` in an array of this shape.

        Raises:
            CheckpointError: the array has another number of axes.
        """
        sizes = self._sizes(shape)
        return tuple(sizes[letter] for letter in self.stacks)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that is read from an array of this shape.

        Raises:
            CheckpointError: the array has another number of axes.
        """
        sizes = self._sizes(shape) | dict(self.first)
        _, target = _axes(self.pattern)
        return tuple(math.prod(sizes[letter] for letter in group) for group in target)

    def dtype(self, dtype: np.dtype) -> np.dtype:
        """Dtype of the tensor that is read from an array of this dtype."""
        return dtype if self.scale == 1 and not self.offset else np.dtype(np.float32)

    def __call__(self, array: Any, index: Any = ()) -> Any:
        """The tensor of an array on the host, or traced; ``index`` has the entry of each of
        ``stacks``, and may be traced."""
        source, target = _axes(self.pattern)
        sizes, fixed, stacks = self._sizes(array.shape), dict(self.at), self.stacks
        shape = self.shape(array.shape)
        axis = 0
        for letter, *others in source:
            if not others and letter in stacks:
                array = _entry(array, index[stacks.index(letter)], axis)
            elif not others and letter in fixed:
                array = _entry(array, fixed[letter], axis)
            else:
                axis += 1
        read = {*fixed, *stacks}
        letters = [letter for group in source for letter in group if letter not in read]
        unmerged = array.reshape(tuple(sizes[letter] for letter in letters))
        for letter, count in self.first:
            axis = letters.index(letter)
            unmerged = unmerged[(slice(None),) * axis + (slice(count),)]
        order = [letters.index(letter) for group in target for letter in group]
        tensor = unmerged.transpose(order).reshape(shape)
        if self.scale == 1 and not self.offset:
            return tensor
        return tensor.astype(np.float32) * np.float32(self.scale) + np.float32(self.offset)

    def _sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Size of each letter in an array of this shape."""
        source, _ = _axes(self.pattern)
        if len(shape) != len(source):
            raise CheckpointError(
                f"has the shape {shape}; the mapping reads it as {self.pattern!r}, from "
                f"{len(source)} axes"
            )
        sizes = dict(self.sizes)
        for group, size in zip(source, shape, strict=True):
            unknown = [letter for letter in group if letter not in sizes]
            known = math.prod(sizes[letter] for letter in group if letter in sizes)
            if len(unknown) > 1 or size % known or (not unknown and size != known):
                raise CheckpointError(
                    f"has the shape {shape}, which {self.pattern!r} with the sizes "
                    f"{dict(self.sizes)} does not fit"
                )
            sizes |= dict.fromkeys(unknown, size // known)
        for letter, count in self.first:
            if sizes[letter] < count:
                raise CheckpointError(
                    f"has {sizes[letter]} entries in axis {letter} of {self.pattern!r}; the model "
                    f"has {count}"
                )
        return sizes


def _entry(array: Any, index: Any, axis: int) -> Any:
    if isinstance(array, np.ndarray):
        return array[(slice(None),) * axis + (int(index),)]
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)


@functools.cache
def _axes(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """The letters of each axis on both sides: [[D], [N], [H]] and [[N, H], [D]].

    Raises:
        CheckpointError: the pattern is malformed.
    """
    source, arrow, target = pattern.partition("->")
    sides = _groups(source), _groups(target)
    flat = [[letter for group in side for letter in group] for side in sides]
    repeats = any(len(set(side)) < len(side) for side in flat)
    if not arrow or repeats or not set(flat[1]) <= set(flat[0]):
        raise CheckpointError(
            f"the pattern {pattern!r} of a mapping is malformed; write it as 'D N H -> (N H) D', "
            "each axis of the tensor once, and of the array"
        )
    return sides


def _groups(side: str) -> list[list[str]]:
    groups: list[list[str]] = []
    inside = False
    for symbol in side.replace("(", " ( ").replace(")", " ) ").split():
        if symbol in "()":
            inside = symbol == "("
            if inside:
                groups.append([])
        elif inside:
            groups[-1].append(symbol)
        else:
            groups.append([symbol])
    return groups
