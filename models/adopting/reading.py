"""How a checkpoint tensor is read from an array whose axes are in another order."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rjax.models.errors import CheckpointError

LAYERS = "L"
"""The axis letter along which an array holds all layers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A tensor that is read from an array.

    Attributes:
        pattern: axes of the array and of the tensor in letters, with merged axes in brackets, such
            as "D N H -> (N H) D". With an axis L, the array holds all layers.
        at: (letter, index) of further axes of the array, of which one entry is read.
        sizes: (letter, size) of letters that are merged in the array, where it does not follow.
        scale: factor of the values, which are rounded to the array's dtype again.
    """

    pattern: str
    at: tuple[tuple[str, int], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    scale: float = 1.0

    @property
    def stacked(self) -> bool:
        """Whether the array holds all layers."""
        return any(LAYERS in group for group in _axes(self.pattern)[0])

    def num_layers(self, shape: tuple[int, ...]) -> int:
        """Number of layers in an array of this shape.

        Raises:
            CheckpointError: the array has another number of axes.
        """
        return self._sizes(shape)[LAYERS]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor that is read from an array of this shape.

        Raises:
            CheckpointError: the array has another number of axes.
        """
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self._target)

    def __call__(self, array: Any, layer: jax.Array | int = 0) -> Any:
        """The tensor of an array on the host, or traced; ``layer`` is that of an array that holds
        all, and may be traced."""
        source, _ = _axes(self.pattern)
        sizes = self._sizes(array.shape)
        fixed = dict(self.at)
        kept: list[list[str]] = []
        for group in source:
            if group == [LAYERS]:
                array = _entry(array, layer, len(kept))
            elif len(group) == 1 and group[0] in fixed:
                array = _entry(array, fixed[group[0]], len(kept))
            else:
                kept.append(group)
        letters = [letter for group in kept for letter in group]
        unmerged = array.reshape(tuple(sizes[letter] for letter in letters))
        order = [letters.index(letter) for group in self._target for letter in group]
        tensor = unmerged.transpose(order).reshape(self.shape(array_shape(source, sizes)))
        if self.scale == 1:
            return tensor
        return (tensor.astype(np.float32) * np.float32(self.scale)).astype(array.dtype)

    @property
    def _target(self) -> list[list[str]]:
        return _axes(self.pattern)[1]

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
        return sizes


def array_shape(axes: Sequence[Sequence[str]], sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of an array with these axes."""
    return tuple(math.prod(sizes[letter] for letter in group) for group in axes)


def _entry(array: Any, index: jax.Array | int, axis: int) -> Any:
    if isinstance(array, np.ndarray):
        return array[(slice(None),) * axis + (int(index),)]
    return jax.lax.dynamic_index_in_dim(array, index, axis, keepdims=False)


@functools.cache
def _axes(pattern: str) -> tuple[list[list[str]], list[list[str]]]:
    """The letters of each axis on both sides: [[D], [N], [H]] and [[N, H], [D]]."""
    source, arrow, target = pattern.partition("->")
    if not arrow:
        raise CheckpointError(
            f"the pattern {pattern!r} of a mapping has no '->'; write it as 'D N H -> (N H) D'"
        )
    return _groups(source), _groups(target)


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
