"""Runs compiled steps on the weights and the device state."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from rjax.worker.backend import Backend
from rjax.worker.device_state import DeviceState
from rjax.worker.programs import StepPrograms
from rjax.worker.step import StepResult
from rjax.worker.step_input import StepInput
from rjax.worker.step_shape import StepFeatures, StepShape

_ALL_ALLOWED = 0xFFFFFFFF  # bitmask word that allows 32 tokens


@dataclasses.dataclass(frozen=True, slots=True)
class UnsampledStep:
    """A step whose forward program is dispatched and whose sampling program is not.

    Attributes:
        shape, features: of the step.
        packed: its input.
        forward: what the forward program returns: the logits, on the device.
    """

    shape: StepShape
    features: StepFeatures
    packed: Int[np.ndarray, " Z"]
    forward: Any


class StepRunner:
    """Dispatches steps; every method returns before the device is done.

    Args:
        model: the NNX module.
        backend: kernels of the steps.
        mesh: devices that hold weights and state.
        vocab_size: width of the logits, V.

    Attributes:
        leaves: flat list of the model's arrays.
        programs: compiled programs by step shape and features.
    """

    def __init__(self, model: nnx.Module, backend: Backend, mesh: Mesh, vocab_size: int) -> None:
        graph, parameters = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(parameters)
        self.programs = StepPrograms(graph, treedef, backend, mesh)
        self._vocab_size = vocab_size
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._all_allowed: dict[int, Array] = {}

    @property
    def weight_dtype(self) -> jnp.dtype:
        """The widest dtype of the weights."""
        return jnp.result_type(*(leaf.dtype for leaf in self.leaves))

    def pack(self, shape: StepShape, step_input: StepInput) -> Int[np.ndarray, " Z"]:
        """The input of a step as one host array."""
        return self.programs.layout(shape).pack(step_input)

    def bitmask(self, rows: int) -> UInt32[np.ndarray, "B W"]:
        """A bitmask of W = ceil(V / 32) words a row that allows every token."""
        return np.full((rows, -(-self._vocab_size // 32)), _ALL_ALLOWED, np.uint32)

    def run(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, " Z"],
    ) -> StepResult:
        """Dispatch a whole step, sampling included."""
        if self.programs.splits_sampling(features):
            unsampled = self.run_forward(state, shape, features, packed)
            if shape.seqs not in self._all_allowed:
                mask = jax.device_put(self.bitmask(shape.seqs), self._replicated)
                self._all_allowed[shape.seqs] = mask
            return self._sample(state, unsampled, self._all_allowed[shape.seqs])
        # The program copies its input to the device: a separate call costs more host time.
        program = self.programs.step(shape, features)
        state.arrays, result = program(self.leaves, state.arrays, packed)
        return result

    def run_multi_step(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, "steps Z"],
    ) -> Int[Array, "steps B"]:
        """Dispatch several steps as one program; returns the tokens of each."""
        program = self.programs.multi_step(shape, features)
        state.arrays, tokens = program(self.leaves, state.arrays, packed)
        return tokens

    def run_forward(
        self,
        state: DeviceState,
        shape: StepShape,
        features: StepFeatures,
        packed: Int[np.ndarray, " Z"],
    ) -> UnsampledStep:
        """Dispatch a forward-only step, to be finished by `sample`."""
        program = self.programs.forward(shape, features)
        state.arrays, forward = program(self.leaves, state.arrays, packed)
        return UnsampledStep(shape, features, packed, forward)

    def sample(
        self, state: DeviceState, step: UnsampledStep, bitmask: UInt32[np.ndarray, "B W"]
    ) -> StepResult:
        """Dispatch the sampling of a forward-only step.

        Args:
            state: of the worker.
            step: from `run_forward`.
            bitmask: bit v % 32 of word v // 32 of row b says whether sequence b may take token v.
        """
        return self._sample(state, step, jax.device_put(bitmask, self._replicated))

    def _sample(self, state: DeviceState, step: UnsampledStep, bitmask: Array) -> StepResult:
        program = self.programs.sampling(step.shape, step.features)
        arrays = state.arrays
        sampling, last_tokens, result = program(
            arrays.sampling, arrays.last_tokens, step.packed, step.forward, bitmask
        )
        state.set_sampling(sampling, last_tokens)
        return result
