"""The methods of `rjax.LLM` that give it new weights."""

from typing import Any

from rjax.closing import SynchronizedClosable, synchronized
from rjax.engine.protocol import Engine, RunningMode
from rjax.models.adopting.mapping import WeightMapping


class UpdatesWeights(SynchronizedClosable):
    """Gives the engine of a subclass new weights.

    Attributes:
        engine: the engine.
    """

    engine: Engine

    @property
    def weights_version(self) -> int:
        """Number of updates of the weights so far."""
        self._check_open()
        return self.engine.weights_version

    @synchronized
    def update_weights(
        self,
        weights: Any,
        *,
        mode: RunningMode = "wait",
        mapping: str | WeightMapping | None = None,
        partial: bool = False,
    ) -> int:
        """Replace the weights by those of a trainer. Nothing is compiled again::

            llm.update_weights(trainer.state_dict())

        KV that old weights computed serves no request any more. Named prefixes and the system
        prompt are computed again when they are first used.

        Args:
            weights: a tree of arrays, such as ``flax.nnx.State`` or a dictionary, or (name, array)
                items. Arrays are NumPy's, JAX's or of any library with DLPack, on the host or on
                any device, sharded or not; those on the engine's devices are not copied through the
                host. Floats are rounded to the engine's dtype, and quantised as at the start.
            mode: what happens to running requests, of `stream` or of `rjax.LLMEngine`: "wait" runs
                steps until they have finished, "abort" ends them with ``finish_reason`` "abort",
                and "keep" lets them go on with the KV that they have; ``weights_versions`` of their
                outputs tells which weights computed each token.
            mapping: names and axes of the arrays: None for those of a Hugging Face checkpoint
                ([outputs, inputs]); "tunix", "easydel" or "maxtext" for parameters of a Qwen, Llama
                or Gemma of these trainers; or a table or a function from a name to the name of a
                tensor and the axes of the array, ("model.norm.weight", None) or
                ("model.layers.0.self_attn.q_proj.weight", "D N H -> (N H) D").
            partial: the weights are some of the tensors; the others stay as they are.

        Returns:
            The new version of the weights: 1 after the first update.

        Raises:
            InvalidWeightsError: a tensor is unknown, missing, not finite, or of the wrong shape or
                type. The old weights stay in use.
        """
        self.engine.start_weight_update(partial=partial, mapping=mapping)
        try:
            self.engine.add_weights(weights)
            return self.engine.finish_weight_update(mode)
        finally:
            self.engine.cancel_weight_update()

    @synchronized
    def start_weight_update(
        self, *, partial: bool = False, mapping: str | WeightMapping | None = None
    ) -> None:
        """Begin an update that arrives in parts; the arguments are those of `update_weights`.

        Nothing changes before `finish_weight_update`. Every error cancels the update.

        Raises:
            InvalidWeightsError: an update is under way, or the mapping cannot be used.
        """
        self.engine.start_weight_update(partial=partial, mapping=mapping)

    @synchronized
    def add_weights(self, items: Any) -> None:
        """Add a part of the weights. The arrays are not copied: leave them unchanged until the
        update is finished.

        Raises:
            InvalidWeightsError: no update is under way, or an array cannot be used.
        """
        self.engine.add_weights(items)

    @synchronized
    def finish_weight_update(self, mode: RunningMode = "wait") -> int:
        """Check all parts and replace the weights; see `update_weights`."""
        return self.engine.finish_weight_update(mode)

    @synchronized
    def cancel_weight_update(self) -> None:
        """Drop an update; nothing happens if none is under way."""
        self.engine.cancel_weight_update()
