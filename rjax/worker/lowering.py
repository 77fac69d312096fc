"""Lowers and compiles the programs of an engine without its arrays."""

import dataclasses
from collections.abc import Iterable
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


def compiler_options(leaves: Iterable[Any], platform: str) -> dict[str, bool]:
    """Options of XLA for the steps of a model, as ``jax.stages.Lowered.compile`` takes them.

    On a GPU, XLA compiles dozens of Triton kernels for each product and times them against cuBLAS.
    With fp8 weights this is most of the time to compile a step. With fp8 and bfloat16 weights,
    steps without these kernels are at least as fast. Weights of integers keep XLA's default: the
    option was not measured with them.

    Args:
        leaves: parameter leaves of the model, or their shapes.
        platform: platform that runs the steps, as JAX names it.
    """
    if platform == "gpu" and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        return {"xla_gpu_enable_triton_gemm": False}
    return {}


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramArguments:
    """The shapes and shardings with which an engine calls its programs. It holds no array.

    Attributes:
        leaves: shapes of the model's parameter leaves, from `shapes_of`.
        state: shapes of the StepState, from `shapes_of`.
        mesh: devices of the steps.
        vocab_size: width of the logits, V.
        hidden_size: width of the hidden states, D.
        dtype: dtype of the hidden states.
        num_decode_steps: steps of a multi-step program.
    """

    leaves: list[Any]
    state: StepState
    mesh: Mesh
    vocab_size: int
    hidden_size: int
    dtype: np.dtype
    num_decode_steps: int


class ProgramLowering:
    """Lowers and compiles programs.

    It holds no array, so that a thread that compiles keeps no memory of a closed engine.

    Args:
        programs: the jitted functions.
        arguments: shapes and shardings of the programs' arguments.
    """

    def __init__(self, programs: StepPrograms, arguments: ProgramArguments) -> None:
        self._programs = programs
        self._arguments = arguments

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Lower a program of steps."""
        program, given = self._programs.get(key), self._arguments
        state, vocab_size = given.state, given.vocab_size
        replicated = NamedSharding(given.mesh, PartitionSpec())
        if key.shape is None:
            shape, words = (key.seqs, vocab_size), -(-vocab_size // 32)
            struct = jax.ShapeDtypeStruct
            logits = struct(shape, jnp.float32, sharding=logits_sharding(shape, given.mesh))
            bitmask = struct((key.seqs, words), jnp.uint32, sharding=replicated)
            rows = np.zeros((2, key.seqs), np.int32)
            return program.lower(state.sampling, state.last_tokens, rows, logits, bitmask)
        if key.kind == "prompt_logprobs":
            rows = key.shape.rows
            hidden = jax.ShapeDtypeStruct(
                (rows, given.hidden_size), given.dtype, sharding=replicated
            )
            return program.lower(given.leaves, hidden, np.zeros(rows, np.int32))
        size = self._programs.layouts[key.shape].size
        packed = np.zeros(size if key.kind == "step" else (given.num_decode_steps, size), np.int32)
        return program.lower(given.leaves, state, packed)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile what `lower` returned."""
        given = self._arguments
        platform = given.mesh.devices.flat[0].platform
        return lowered.compile(compiler_options=compiler_options(given.leaves, platform))

    def lower_admission(self, admission: Admission) -> jax.stages.Lowered:
        """Lower an admission of sequences."""
        given = self._arguments
        return lower_admission(given.state.sampling, given.vocab_size, admission)
