"""Lowers the programs of an engine without its arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.sampling import Admission, lower_admission
from rjax.worker.programs import ProgramKey, StepPrograms
from rjax.worker.step import StepState, logits_sharding


def shapes_of(arrays: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        arrays,
    )


class ProgramLowering:
    """Lowers programs for the shapes and shardings with which the engine calls them.

    It holds no array, so that a thread that compiles keeps no memory of a closed engine.

    Args:
        programs: the jitted functions.
        leaves: shapes of the model's leaves, by `shapes_of`.
        state: shapes of the StepState.
        mesh: devices of the steps.
        vocab_size: width of the logits, V.
        num_decode_steps: steps of a multi-step program.
    """

    def __init__(
        self,
        programs: StepPrograms,
        leaves: list[Any],
        state: StepState,
        mesh: Mesh,
        *,
        vocab_size: int,
        num_decode_steps: int,
    ) -> None:
        self._programs = programs
        self._leaves, self._state = leaves, state
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._num_decode_steps = num_decode_steps

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Lower a program of steps."""
        program, state = self._programs.get(key), self._state
        if key.shape is None:
            shape, words = (key.seqs, self._vocab_size), -(-self._vocab_size // 32)
            struct = jax.ShapeDtypeStruct
            logits = struct(shape, jnp.float32, sharding=logits_sharding(shape, self._mesh))
            replicated = NamedSharding(self._mesh, PartitionSpec())
            bitmask = struct((key.seqs, words), jnp.uint32, sharding=replicated)
            rows = np.zeros((2, key.seqs), np.int32)
            return program.lower(state.sampling, state.last_tokens, rows, logits, bitmask)
        size = self._programs.layouts[key.shape].size
        packed = np.zeros(size if key.kind == "step" else (self._num_decode_steps, size), np.int32)
        return program.lower(self._leaves, state, packed)

    def lower_admission(self, admission: Admission) -> jax.stages.Lowered:
        """Lower an admission of sequences."""
        return lower_admission(self._state.sampling, self._vocab_size, admission)
