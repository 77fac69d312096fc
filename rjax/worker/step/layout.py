"""The input of a step as one array, which reaches the device in one transfer."""

import math
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from rjax.worker.step.input import IntArray, StepInput
from rjax.worker.step.prepare import empty_input
from rjax.worker.step.shape import StepShape

_ALIGNMENT = 64  # int32s: GPU kernels may read a slice in place and need 256-byte alignment


class PackedLayout:
    """Packs a StepInput of one shape into one int32 vector and, inside the step, unpacks it."""

    def __init__(self, shape: StepShape) -> None:
        template = empty_input(shape)
        self.shape = shape
        leaves, self._treedef = jax.tree.flatten(template)
        self._shapes = [leaf.shape for leaf in leaves]
        ends = np.cumsum([-(-leaf.size // _ALIGNMENT) * _ALIGNMENT for leaf in leaves])
        self._starts = [0, *ends[:-1].tolist()]
        self.size = int(ends[-1])
        sampled = (template.slots, template.live)
        starts = zip(self._starts, leaves, strict=True)
        self._sampled = [start for start, leaf in starts if any(leaf is each for each in sampled)]

    def pack(self, step_input: StepInput) -> Int[np.ndarray, " Z"]:
        """All leaves, one after the other, each at an aligned offset."""
        packed = np.zeros(self.size, np.int32)
        leaves = zip(self._starts, self._shapes, jax.tree.leaves(step_input), strict=True)
        for start, shape, leaf in leaves:
            assert leaf.shape == shape, (leaf.shape, shape)
            packed[start : start + leaf.size] = np.ravel(leaf)
        return packed

    def sampled_rows(self, packed: Int[np.ndarray, " Z"]) -> Int[np.ndarray, "2 B"]:
        """The fields ``slots`` and ``live`` of a packed StepInput."""
        seqs = self.shape.seqs
        return np.stack([packed[start : start + seqs] for start in self._sampled])

    def unpack(self, packed: Int[IntArray, " Z"]) -> StepInput:
        """The StepInput again, as slices of the device array, or as views of the host's."""
        leaves: list[Any] = [
            packed[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(self._starts, self._shapes, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


class PackedLayouts(dict[StepShape, PackedLayout]):
    """The layout of each step shape, made at the first look-up."""

    def __missing__(self, shape: StepShape) -> PackedLayout:
        layout = self[shape] = PackedLayout(shape)
        return layout
