"""Decode steps that are held back until several can start as one program."""

import dataclasses

import numpy as np
from jaxtyping import Array, Int

from rjax.worker.step import StepResult
from rjax.worker.step_shape import StepFeatures, StepShape

type StepKind = tuple[StepShape, StepFeatures]


@dataclasses.dataclass(slots=True)
class GatheredResult:
    """A step's part of what it was started in.

    Attributes:
        result: its StepResult, or the tokens of all steps that started with it; on the device,
            and None until it is started.
        index: of the step among those tokens.
    """

    result: StepResult | Int[Array, "steps B"] | None = None
    index: int = 0


class GatheredSteps:
    """Steps of one kind, in their order, up to ``count`` of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._kind: StepKind | None = None
        self._steps: list[tuple[Int[np.ndarray, " Z"], GatheredResult]] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """Whether they can start."""
        return len(self._steps) == self.count

    def takes(self, kind: StepKind) -> bool:
        """Whether a step of this kind can follow those that are here."""
        return not self._steps or self._kind == kind

    def add(self, kind: StepKind, packed: Int[np.ndarray, " Z"]) -> GatheredResult:
        """Put a step, by its packed input, after those that are here."""
        assert self.takes(kind) and not self.full
        self._kind = kind
        self._steps.append((packed, GatheredResult()))
        return self._steps[-1][1]

    def take(self) -> tuple[StepKind, list[Int[np.ndarray, " Z"]], list[GatheredResult]]:
        """All of them, and none is left: their kind, inputs and results to be filled in."""
        assert self._kind is not None and self._steps
        inputs, results = zip(*self._steps, strict=True)
        self._steps = []
        return self._kind, list(inputs), list(results)
