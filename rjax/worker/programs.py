"""The compiled programs of steps, each made at its first use."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from rjax.worker.backend import Backend
from rjax.worker.kernels.uses import KernelLog
from rjax.worker.step import compile_forward_step, compile_sampling, compile_step
from rjax.worker.step_input import PackedLayout
from rjax.worker.step_shape import StepFeatures, StepShape


class StepPrograms:
    """Makes and keeps the programs of each step shape and set of features.

    Most steps are one program. Steps that sample in rarer ways have split sampling
    (`splits_sampling`): a forward-only program, then a sampling program. The many ways to sample
    then share the program that takes long to compile.

    Args:
        graph: of the model.
        treedef: of its flat parameter leaves.
        backend: kernels of the steps.
        mesh: devices of the steps.
    """

    def __init__(self, graph: Any, treedef: Any, backend: Backend, mesh: Mesh) -> None:
        self._model = graph, treedef
        self._target = backend, mesh
        self._layouts: dict[StepShape, PackedLayout] = {}
        self._kernel_log = KernelLog(backend)
        self._made: dict[tuple[str, StepShape, StepFeatures], Any] = {}

    def __len__(self) -> int:
        return len(self._made)

    def layout(self, shape: StepShape) -> PackedLayout:
        """How the input of a step of this shape is packed."""
        if shape not in self._layouts:
            self._layouts[shape] = PackedLayout(shape)
        return self._layouts[shape]

    @staticmethod
    def splits_sampling(features: StepFeatures) -> bool:
        """Whether such a step is a `forward` and a `sampling` program, not one `step`."""
        return features.sampling == "full" or features.num_logprobs > 0

    def step(self, shape: StepShape, features: StepFeatures) -> Any:
        """A whole step; see `compile_step`."""
        return self._get("step", shape, features, self._compile(compile_step))

    def multi_step(self, shape: StepShape, features: StepFeatures) -> Any:
        """Several steps in one program.

        Its arguments are those of `step`, with an axis of steps before the axis of ``packed``. It
        returns the state after the last step and the tokens of all steps, [steps, B].
        """

        def make(layout: PackedLayout, features: StepFeatures) -> Any:
            del layout
            step = self.step(shape, features)

            def multi_step(leaves: Any, state: Any, packed: jax.Array) -> Any:
                def body(state: Any, packed_step: jax.Array) -> tuple[Any, jax.Array]:
                    state, result = step(leaves, state, packed_step)
                    return state, result.tokens

                return jax.lax.scan(body, state, packed)

            return jax.jit(multi_step, donate_argnums=1)

        return self._get("multi_step", shape, features, make)

    def forward(self, shape: StepShape, features: StepFeatures) -> Any:
        """A forward-only step, the same for every way to sample; see `compile_forward_step`."""
        num_logprobs = features.num_logprobs if features.prompt_logprobs else 0
        features = StepFeatures("greedy", num_logprobs, features.prompt_logprobs)
        return self._get("forward", shape, features, self._compile(compile_forward_step))

    def sampling(self, shape: StepShape, features: StepFeatures) -> Any:
        """The sampling after a forward-only step; see `compile_sampling`."""
        features = dataclasses.replace(features, prompt_logprobs=False)
        return self._get("sampling", shape, features, compile_sampling)

    def _compile(self, compiler: Callable[..., Any]) -> Callable[[PackedLayout, StepFeatures], Any]:
        return lambda layout, features: compiler(
            *self._model, layout, features, *self._target, self._kernel_log
        )

    def _get(
        self,
        kind: str,
        shape: StepShape,
        features: StepFeatures,
        make: Callable[[PackedLayout, StepFeatures], Any],
    ) -> Any:
        key = kind, shape, features
        if key not in self._made:
            self._made[key] = make(self.layout(shape), features)
        return self._made[key]
