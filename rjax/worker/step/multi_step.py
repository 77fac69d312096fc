"""Decode steps that wait until several of them can run as one program."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from rjax.batch.step_readout import StepReadout
from rjax.worker.programs.keys import multi_step_key
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.multi_step_policy import DecodeProgram, MultiStepPolicy
from rjax.worker.step.result import StepResult, read_result, start_copy
from rjax.worker.step.runner import StepRunner
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import DeviceState


@dataclasses.dataclass(slots=True)
class QueuedResult:
    """The result of one decode step.

    Attributes:
        result: the StepResult of the step, or the tokens of all steps that ran in one program with
            it, on the device. None until the step is dispatched.
        index: index of the step in those tokens.
        program: program that the policy times; None for the steps of an incomplete queue.
    """

    result: StepResult | Int[Array, "steps B"] | None = None
    index: int = 0
    program: DecodeProgram | None = None


class MultiStepQueue:
    """Queues decode steps of one shape and one set of features.

    ``num_steps`` of them are dispatched as one program. Fewer are dispatched one by one: when a
    step of another kind follows, or when `flush` is called, before anything else reads or replaces
    the device state.

    Args:
        runner: dispatches the steps.
        state: the worker's device state.
        num_steps: steps of one program; 1 queues nothing.
        policy: is told when steps are dispatched and read; None for a fixed number of steps.
    """

    def __init__(
        self,
        runner: StepRunner,
        state: DeviceState,
        num_steps: int,
        policy: MultiStepPolicy | None = None,
    ) -> None:
        self.num_steps = num_steps
        self._runner = runner
        self._state = state
        self._policy = policy
        self._kind: tuple[StepShape, StepFeatures] | None = None
        self._steps: list[tuple[Int[np.ndarray, " Z"], QueuedResult]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def takes(self, features: StepFeatures) -> bool:
        """Whether decode steps with these features can be queued."""
        logprobs = features.num_logprobs or features.num_prompt_logprobs
        return self.num_steps > 1 and not logprobs and features.sampling != "full"

    def add(
        self, shape: StepShape, features: StepFeatures, packed: Int[np.ndarray, " Z"]
    ) -> QueuedResult:
        """Queue a step by its packed input.

        The last of ``num_steps`` dispatches them. So does a step of another kind, one by one, and
        itself too.
        """
        assert self.takes(features)
        result = QueuedResult()
        same_kind = not self._steps or self._kind == (shape, features)
        if not same_kind:
            self.flush()
        self._kind = shape, features
        self._steps.append((packed, result))
        if not same_kind:
            self.flush()
        elif len(self._steps) == self.num_steps:
            self._run_as_one(shape, features)
        return result

    def run_alone(
        self, shape: StepShape, features: StepFeatures, packed: Int[np.ndarray, " Z"]
    ) -> QueuedResult:
        """Dispatch a step that could be queued at once, and the queued ones before it."""
        self.flush()
        program = self._dispatched(shape, features, 1)
        result = start_copy(self._runner.run(self._state, shape, features, packed))
        return QueuedResult(result, program=program)

    def flush(self) -> None:
        """Dispatch every queued step."""
        if not self._steps:
            return
        assert self._kind is not None
        steps, self._steps = self._steps, []
        for packed, result in steps:
            result.result = start_copy(self._runner.run(self._state, *self._kind, packed))

    def read(self, step: QueuedResult) -> StepReadout:
        """Wait for a step that is dispatched and copy its tokens to the host."""
        found = step.result
        assert found is not None
        tokens: Any = found.tokens if isinstance(found, StepResult) else found
        late = self._policy is not None and tokens.is_ready()
        if isinstance(found, StepResult):
            readout = read_result(found)
        else:
            readout = StepReadout(np.asarray(found)[step.index], None, None, len(found))
        if self._policy is not None and step.program is not None:
            self._policy.read(step.program, late=late)
        return readout

    def _run_as_one(self, shape: StepShape, features: StepFeatures) -> None:
        steps, self._steps = self._steps, []
        packed = np.stack([packed for packed, _ in steps])
        program = self._dispatched(shape, features, len(steps))
        tokens = self._runner.run_multi_step(self._state, shape, features, packed)
        tokens.copy_to_host_async()
        for index, (_, result) in enumerate(steps):
            result.result, result.index, result.program = tokens, index, program

    def _dispatched(
        self, shape: StepShape, features: StepFeatures, num_steps: int
    ) -> DecodeProgram | None:
        if self._policy is None:
            return None
        return self._policy.dispatched(multi_step_key(shape, features), num_steps)
