"""What identifies a program of steps, its jitted function and its arguments."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.worker.backend import Backend
from rjax.worker.kernels.uses import KernelLog
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.program import (
    compile_prompt_logprobs,
    compile_sampling,
    compile_step,
    logits_sharding,
)
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState

_GREEDY = StepFeatures("greedy")


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramKey:
    """Identifies one program of an engine.

    Attributes:
        kind: "step" computes logits and greedy tokens; "sampling" replaces the tokens of a step;
            "prompt_logprobs" follows a step too; "multi_step" runs several steps, sampling
            included.
        shape: shape of the step; None for "sampling".
        seqs: sequences in the batch, B.
        features: what it computes.
    """

    kind: Literal["step", "sampling", "prompt_logprobs", "multi_step"]
    shape: StepShape | None
    seqs: int
    features: StepFeatures


def step_key(shape: StepShape) -> ProgramKey:
    """The step program of a shape: one for all features."""
    return ProgramKey("step", shape, shape.seqs, _GREEDY)


def sampling_key(seqs: int, features: StepFeatures) -> ProgramKey | None:
    """The sampling program of a step, or None if the step's own greedy tokens serve.

    In steps with logprobs, the mode "random" serves greedy sequences too.
    """
    if features.num_logprobs:
        if features.sampling == "greedy":
            features = dataclasses.replace(features, sampling="random")
    elif features.sampling == "greedy":
        return None
    features = dataclasses.replace(features, num_prompt_logprobs=0)
    return ProgramKey("sampling", None, seqs, features)


def prompt_logprobs_key(shape: StepShape, features: StepFeatures) -> ProgramKey | None:
    """The program of a step's prompt logprobs; None without."""
    if not features.num_prompt_logprobs:
        return None
    features = StepFeatures("greedy", num_prompt_logprobs=features.num_prompt_logprobs)
    return ProgramKey("prompt_logprobs", shape, shape.seqs, features)


def keys_of_step(shape: StepShape, features: StepFeatures) -> tuple[ProgramKey, ...]:
    """All programs that a step runs."""
    sampling = sampling_key(shape.seqs, features)
    found = (step_key(shape), sampling, prompt_logprobs_key(shape, features))
    return tuple(key for key in found if key is not None)


def multi_step_key(shape: StepShape, features: StepFeatures) -> ProgramKey:
    """The program of several decode steps."""
    return ProgramKey("multi_step", shape, shape.seqs, features)


class StepPrograms:
    """Makes and keeps the jitted functions of steps.

    Every step shape has one program of the model, which also takes the greedy tokens. Steps that
    sample in another way run a sampling program after it, which is small, and the same for every
    step shape with as many sequences. So do steps with prompt logprobs.

    Args:
        graph: the model's graph definition.
        treedef: tree structure of the model's flat parameter leaves.
        backend: kernels of the steps.
        mesh: devices of the steps.
        layouts: layouts of the packed inputs, by step shape.

    Attributes:
        layouts: layouts of the packed inputs, by step shape.
    """

    def __init__(
        self, graph: Any, treedef: Any, backend: Backend, mesh: Mesh, layouts: PackedLayouts
    ) -> None:
        self.layouts = layouts
        self._model = graph, treedef
        self._target = backend, mesh
        self._kernel_log = KernelLog(backend)
        self._made: dict[ProgramKey, Any] = {}

    def get(self, key: ProgramKey) -> Any:
        """The jitted function; see `compile_step`, `compile_sampling`, `compile_prompt_logprobs`.

        The arguments of a multi-step program are those of a step, with an axis of steps before the
        axis of ``packed``. It returns the state after the last step and the tokens of all steps,
        [steps, B].
        """
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: ProgramKey) -> Any:
        if key.shape is None:
            return compile_sampling(key.features)
        if key.kind == "prompt_logprobs":
            return compile_prompt_logprobs(*self._model, key.features.num_prompt_logprobs)
        layout = self.layouts[key.shape]
        step = compile_step(*self._model, layout, key.features, *self._target, self._kernel_log)
        if key.kind == "step":
            return step

        def multi_step(leaves: Any, state: Any, packed: jax.Array) -> Any:
            def body(state: Any, packed_step: jax.Array) -> tuple[Any, jax.Array]:
                state, result = step(leaves, state, packed_step)
                return state, result.tokens

            return jax.lax.scan(body, state, packed)

        return jax.jit(multi_step, donate_argnums=1)


def shapes_of(arrays: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        arrays,
    )


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

    def of(self, key: ProgramKey, layouts: PackedLayouts) -> tuple[Any, ...]:
        """The arguments of a program's jitted function, as shapes."""
        struct, replicated = jax.ShapeDtypeStruct, NamedSharding(self.mesh, PartitionSpec())
        if key.shape is None:
            shape, words = (key.seqs, self.vocab_size), -(-self.vocab_size // 32)
            logits = struct(shape, jnp.float32, sharding=logits_sharding(shape, self.mesh))
            bitmask = struct((key.seqs, words), jnp.uint32, sharding=replicated)
            rows = np.zeros((2, key.seqs), np.int32)
            return self.state.sampling, self.state.last_tokens, rows, logits, bitmask
        if key.kind == "prompt_logprobs":
            shape = key.shape.rows, self.hidden_size
            hidden = struct(shape, self.dtype, sharding=replicated)
            rows = key.shape.rows
            return self.leaves, hidden, np.zeros(rows, np.int32), np.ones(rows, np.float32)
        size = layouts[key.shape].size
        packed = np.zeros(size if key.kind == "step" else (self.num_decode_steps, size), np.int32)
        return self.leaves, self.state, packed
