"""Decode steps that wait until several of them can run as one program."""

import dataclasses

import numpy as np
from jaxtyping import Array, Int

from rjax.worker.device_state import DeviceState
from rjax.worker.readout import start_copy
from rjax.worker.step import StepResult
from rjax.worker.step_runner import StepRunner
from rjax.worker.step_shape import StepFeatures, StepShape


@dataclasses.dataclass(slots=True)
class QueuedResult:
    """The result of one queued step.

    Attributes:
        result: on the device: the StepResult of the step, or the tokens of all steps that ran in
            one program with it. None until the step is dispatched.
        index: of the step in those tokens.
    """

    result: StepResult | Int[Array, "steps B"] | None = None
    index: int = 0


class MultiStepQueue:
    """Queues decode steps of one shape and one set of features.

    ``num_steps`` of them are dispatched as one program. Fewer are dispatched one by one, when
    `flush` is called: before anything else reads or replaces the device state.

    Args:
        runner: dispatches the steps.
        state: of the worker.
        num_steps: steps of one program; 1 queues nothing.
    """

    def __init__(self, runner: StepRunner, state: DeviceState, num_steps: int) -> None:
        self.num_steps = num_steps
        self._runner = runner
        self._state = state
        self._kind: tuple[StepShape, StepFeatures] | None = None
        self._steps: list[tuple[Int[np.ndarray, " Z"], QueuedResult]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def takes(self, features: StepFeatures) -> bool:
        """Whether decode steps with these features are queued."""
        return self.num_steps > 1 and not features.num_logprobs and features.sampling != "full"

    def add(
        self, shape: StepShape, features: StepFeatures, packed: Int[np.ndarray, " Z"]
    ) -> QueuedResult:
        """Queue a step by its packed input.

        Steps of another kind are flushed before it. The last of ``num_steps`` dispatches them.
        """
        assert self.takes(features)
        if self._kind != (shape, features):
            self.flush()
        self._kind = shape, features
        result = QueuedResult()
        self._steps.append((packed, result))
        if len(self._steps) == self.num_steps:
            self._run_as_one(shape, features)
        return result

    def flush(self) -> None:
        """Dispatch every queued step."""
        if not self._steps:
            return
        assert self._kind is not None
        steps, self._steps = self._steps, []
        for packed, result in steps:
            result.result = start_copy(self._runner.run(self._state, *self._kind, packed))

    def _run_as_one(self, shape: StepShape, features: StepFeatures) -> None:
        steps, self._steps = self._steps, []
        packed = np.stack([packed for packed, _ in steps])
        tokens = self._runner.run_multi_step(self._state, shape, features, packed)
        tokens.copy_to_host_async()
        for index, (_, result) in enumerate(steps):
            result.result, result.index = tokens, index
