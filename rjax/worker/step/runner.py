"""Runs compiled steps on the weights and the device state."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from rjax.worker.programs.cache import CompiledPrograms
from rjax.worker.programs.keys import (
    ProgramKey,
    multi_step_key,
    prompt_logprobs_key,
    sampling_key,
    step_key,
)
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.prepare import PromptTargets
from rjax.worker.step.result import StepResult
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import DeviceState

_ALL_ALLOWED = 0xFFFFFFFF  # bitmask word that allows 32 tokens


@dataclasses.dataclass(frozen=True, slots=True)
class UnsampledStep:
    """A step whose logits are computed and whose sampling is not dispatched.

    Attributes:
        features: the step's features.
        rows: slots and live, as in StepInput.
        result: result of the step program, on the device.
    """

    features: StepFeatures
    rows: Int[np.ndarray, "2 B"]
    result: StepResult


class StepRunner:
    """Dispatches steps; every method returns before the device is done.

    Args:
        leaves: the model's arrays.
        programs: compiled programs of the steps.
        mesh: devices that hold weights and state.
        vocab_size: width of the logits, V.
        layouts: layouts of the packed inputs, by step shape.

    Attributes:
        leaves: the model's arrays.
        programs: compiled programs of the steps.
        layouts: layouts of the packed inputs, by step shape.
        waits: begin and end of the first calls, which compile what is not compiled yet.
        waiting: whether a first call is under way.
    """

    def __init__(
        self,
        leaves: list[Array],
        programs: CompiledPrograms,
        mesh: Mesh,
        vocab_size: int,
        layouts: PackedLayouts,
    ) -> None:
        self.leaves = leaves
        self.programs = programs
        self.layouts = layouts
        self.waits: tuple[tuple[float, float], ...] = ()
        self.waiting = False
        self._vocab_size = vocab_size
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._all_allowed: dict[int, Array] = {}
        self._called: set[ProgramKey] = set()

    def bitmask(self, rows: int) -> UInt32[np.ndarray, "B W"]:
        """A bitmask of W = ceil(V / 32) words a row that allows every token."""
        return np.full((rows, -(-self._vocab_size // 32)), _ALL_ALLOWED, np.uint32)

    def run(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, " Z"],
        targets: PromptTargets | None = None,
    ) -> StepResult:
        """Dispatch a whole step, sampling included.

        Args:
            state: the worker's device state.
            shape: the step's shape.
            features: the step's features.
            packed: the step's packed input.
            targets: those of a step with prompt logprobs.
        """
        step = self.run_forward(state, shape, features, packed, targets)
        if sampling_key(shape.seqs, features) is None:
            return dataclasses.replace(step.result, logits=None)
        if shape.seqs not in self._all_allowed:
            mask = jax.device_put(self.bitmask(shape.seqs), self._replicated)
            self._all_allowed[shape.seqs] = mask
        return self._sample(state, step, self._all_allowed[shape.seqs])

    def run_multi_step(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, "steps Z"],
    ) -> Int[Array, "steps B"]:
        """Dispatch several steps as one program; returns the tokens of each."""
        key = multi_step_key(shape, features)
        state.arrays, tokens = self._call(key, self.leaves, state.arrays, packed)
        return tokens

    def run_forward(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, " Z"],
        targets: PromptTargets | None = None,
    ) -> UnsampledStep:
        """Dispatch a step whose tokens `sample` replaces, with its prompt logprobs. The arguments
        are those of `run`."""
        # The program copies its input to the device: a separate call costs more host time.
        state.arrays, result = self._call(step_key(shape), self.leaves, state.arrays, packed)
        hidden, result = result.hidden, dataclasses.replace(result, hidden=None)
        if (key := prompt_logprobs_key(shape, features)) is not None:
            assert targets is not None
            prompt = self._call(key, self.leaves, hidden, *targets)
            result = dataclasses.replace(result, prompt=prompt)
        return UnsampledStep(features, self.layouts[shape].sampled_rows(packed), result)

    def sample(
        self, state: DeviceState, step: UnsampledStep, bitmask: UInt32[np.ndarray, "B W"]
    ) -> StepResult:
        """Dispatch the sampling of a step.

        Args:
            state: the worker's device state.
            step: the unsampled step that `run_forward` returned.
            bitmask: bit v % 32 of word v // 32 of row b says whether sequence b may take token v.
        """
        return self._sample(state, step, jax.device_put(bitmask, self._replicated))

    def _sample(self, state: DeviceState, step: UnsampledStep, bitmask: Array) -> StepResult:
        rows, arrays = step.rows, state.arrays
        key = sampling_key(rows.shape[1], step.features)
        assert key is not None
        sampling, last_tokens, result = self._call(
            key, arrays.sampling, arrays.last_tokens, rows, step.result.logits, bitmask
        )
        state.set_sampling(sampling, last_tokens)
        return dataclasses.replace(result, prompt=step.result.prompt)

    def _call(self, key: ProgramKey, *arguments: Any) -> Any:
        if key in self._called:
            return self.programs.get(key)(*arguments)
        start = time.monotonic()
        self.waiting = True
        try:
            result = self.programs.get(key)(*arguments)
        finally:
            self.waiting = False
        self.waits += ((start, time.monotonic()),)
        self._called.add(key)
        return result
