"""The compiled programs of a worker's steps, each made when it is first wanted."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from rjax.worker.backend import Backend
from rjax.worker.step import compile_held_step, compile_sampling, compile_step
from rjax.worker.step_input import PackedLayout
from rjax.worker.step_shape import StepFeatures, StepShape


class StepPrograms:
    """Makes and keeps the programs for each shape and set of features.

    What most steps do is one program. The rest (`in_parts`) is two, the step and its sampling, so
    that the many ways to sample share the one that takes long to compile.

    Args:
        graph, treedef: of the model, and of its flat parameter leaves.
        backend, mesh: that steps run on.
    """

    def __init__(self, graph: Any, treedef: Any, backend: Backend, mesh: Mesh) -> None:
        self._model = graph, treedef
        self._place = backend, mesh
        self._layouts: dict[StepShape, PackedLayout] = {}
        self._made: dict[tuple[str, StepShape, StepFeatures], Any] = {}

    def __len__(self) -> int:
        return len(self._made)

    def layout(self, shape: StepShape) -> PackedLayout:
        """How the input of a step of this shape is packed."""
        if shape not in self._layouts:
            self._layouts[shape] = PackedLayout(shape)
        return self._layouts[shape]

    @staticmethod
    def in_parts(features: StepFeatures) -> bool:
        """Whether such a step is `held` and then has its `sampling`, or is `whole`."""
        return features.sampling == "full" or features.num_logprobs > 0

    def whole(self, shape: StepShape, features: StepFeatures) -> Any:
        """See `compile_step`."""
        return self._get("whole", shape, features, self._compile(compile_step))

    def several(self, shape: StepShape, features: StepFeatures) -> Any:
        """As `whole`, for several steps one after the other: ``packed`` has them on an axis before
        its own, and so have their tokens, which are all of the result."""

        def make(layout: PackedLayout, features: StepFeatures) -> Any:
            del layout
            one = self.whole(shape, features)

            def run(leaves: Any, state: Any, packed: jax.Array) -> Any:
                def step(state: Any, given: jax.Array) -> tuple[Any, jax.Array]:
                    state, result = one(leaves, state, given)
                    return state, result.tokens

                return jax.lax.scan(step, state, packed)

            return jax.jit(run, donate_argnums=1)

        return self._get("several", shape, features, make)

    def held(self, shape: StepShape, features: StepFeatures) -> Any:
        """See `compile_held_step`; it is the same for every way to sample."""
        wanted = features.num_logprobs if features.prompt_logprobs else 0
        features = StepFeatures("greedy", wanted, features.prompt_logprobs)
        return self._get("held", shape, features, self._compile(compile_held_step))

    def sampling(self, shape: StepShape, features: StepFeatures) -> Any:
        """See `compile_sampling`."""
        features = dataclasses.replace(features, prompt_logprobs=False)
        return self._get("sampling", shape, features, compile_sampling)

    def _compile(self, compiler: Callable[..., Any]) -> Callable[[PackedLayout, StepFeatures], Any]:
        return lambda layout, features: compiler(*self._model, layout, features, *self._place)

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
