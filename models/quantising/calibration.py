"""The inputs of each projection, recorded while prompts run through a model layer by layer."""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from rjax.models.config import ModelConfig
from rjax.models.decoder import DecoderLayer
from rjax.models.dense import DenseAttention
from rjax.models.families import FAMILIES
from rjax.models.layers.linear import Linear
from rjax.models.loading.pieces import piece_shape, view
from rjax.models.operations import Residual
from rjax.models.quantising.projections import linears_of
from rjax.models.rope import RopeConfig, rotary_tables

Tensors = Mapping[str, np.ndarray]
"""Tensors of a checkpoint by name."""

_BATCH_TOKENS = 2048
_SHORTEST = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class InputStatistics:
    """Means over the recorded tokens.

    Attributes:
        magnitudes: mean absolute value of each input.
        products: mean product of each two inputs.
    """

    magnitudes: Float[Array, " E"]
    products: Float[Array, "E E"]


class RecordingOperations(DenseAttention):
    """Plain operations that keep the inputs of some projections.

    One object is for one call of a layer.

    Args:
        linears: the projections by name.
    """

    def __init__(self, linears: Mapping[str, Linear]) -> None:
        self.inputs: dict[str, Float[Array, "T E"]] = {}
        self._names = {id(linear): name for name, linear in linears.items()}

    def linear(self, linear: Linear, h: Any) -> Any:
        """The projection of h, which is kept if the projection has a name."""
        name = self._names.get(id(linear))
        if name is not None:
            self.inputs[name] = h.reshape(len(h), linear.depth)
        return super().linear(linear, h)


class Calibration:
    """Prompts on their way through the layers of a model.

    The host holds the residual stream of all prompts, the device that of one batch. Everything is
    float32.

    Args:
        config: the model's config.
        prompts: token ids, at least one prompt that is not empty.
        tensors: checkpoint tensors by name, with the embeddings.
    """

    def __init__(
        self, config: ModelConfig, prompts: Sequence[Sequence[int]], tensors: Tensors
    ) -> None:
        if not any(len(prompt) for prompt in prompts):
            raise ValueError("there are no prompts with tokens")
        self._config = config
        self.num_tokens = sum(map(len, prompts))
        weights = FAMILIES[config.architecture].weights(config)
        embedding = tensors[weights["embedding.weight"][0].tensor]
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []
        for tokens, mask in _batches(prompts):
            x = embedding[np.minimum(tokens, len(embedding) - 1)].astype(np.float32)
            x *= np.float32(config.scales.embedding)
            if config.norms.on_embedding:
                scale, bias = (
                    tensors[weights[f"embedding_norm.{leaf}"][0].tensor].astype(np.float32)
                    for leaf in ("weight", "bias")
                )
                x -= x.mean(-1, keepdims=True)
                x *= scale / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.norm_eps)
                x += bias
            if config.learned_positions:
                rows = np.arange(tokens.shape[1]) + config.position_offset
                table = tensors[weights["positions.weight"][0].tensor]
                x += table[np.minimum(rows, len(table) - 1)].astype(np.float32)
            self._batches.append((x, mask))

    def advance(self, layer: int, tensors: Tensors) -> dict[str, InputStatistics]:
        """Run one layer; returns the statistics of the inputs of each of `linears_of` it.

        Layers must be run in order.

        Args:
            layer: index of the layer.
            tensors: checkpoint tensors of the layer, not quantised.
        """
        module = decoder_layer(self._config, layer, tensors)
        names = linears_of(self._config, layer)
        sizes = {name: linear.depth for name, linear in _named(module, names).items()}
        graph, state = nnx.split(module)
        sums = {
            name: InputStatistics(jnp.zeros(size), jnp.zeros((size, size)))
            for name, size in sizes.items()
        }
        for i, (x, mask) in enumerate(self._batches):
            out, sums = _run(
                graph, state, jnp.asarray(x), jnp.asarray(mask), sums, self._config.rope_of(layer)
            )
            self._batches[i] = np.asarray(out), mask
        return jax.tree.map(lambda one: one / self.num_tokens, sums)


def _named(layer: DecoderLayer, names: Iterable[str]) -> dict[str, Linear]:
    """The projections of a layer by name, such as "attention.qkv"."""
    return {name: operator.attrgetter(name)(layer) for name in names}


@functools.partial(jax.jit, static_argnames="rope", donate_argnames="sums")
def _run(
    graph: nnx.GraphDef,
    state: Any,
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"],
    sums: dict[str, InputStatistics],
    rope: RopeConfig | None,
) -> tuple[Float[Array, "B T D"], dict[str, InputStatistics]]:
    layer: DecoderLayer = nnx.merge(graph, state)
    rotary = None if rope is None else rotary_tables(rope, jnp.arange(x.shape[1]))

    def of_sequence(one: Array) -> tuple[Array, dict[str, Array]]:
        operations = RecordingOperations(_named(layer, sums))
        return layer(Residual(one), rotary, operations).total(), operations.inputs

    out, recorded = jax.vmap(of_sequence)(x)
    added = {}
    for name, before in sums.items():
        inputs = recorded[name]
        inputs = jnp.where(mask[..., None], inputs, 0).reshape(-1, inputs.shape[-1])
        products = jnp.matmul(inputs.T, inputs, precision="highest")
        added[name] = InputStatistics(
            before.magnitudes + jnp.abs(inputs).sum(0), before.products + products
        )
    return out, added


def decoder_layer(config: ModelConfig, layer: int, tensors: Tensors) -> DecoderLayer:
    """One layer in float32, from its tensors in the checkpoint."""
    weights = FAMILIES[config.architecture].weights(config)
    # Layers of one kind are equal but for their weights, and share a program.
    kinds = [(config.is_linear(i), window) for i, window in enumerate(config.sliding_windows)]
    abstract = DecoderLayer(config, kinds.index(kinds[layer]), jnp.float32)
    graph, state = nnx.split(abstract)
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        letters: str = leaf.get_metadata("letters")
        parts = []
        for piece in weights[".".join(map(str, ("layers", layer, *path)))]:
            rows = slice(piece.first_row, piece.first_row + piece_shape(piece, config)[0])
            found = view(piece, letters, config)
            part = tensors[piece.tensor][rows].reshape(found.shape).transpose(found.order)
            parts.append(part + np.float32(piece.offset) if piece.offset else part)
        whole = parts[0]
        if len(parts) > 1:
            whole = np.concatenate(parts, letters.split().index("A"))
        filled.append((path, leaf.replace(jnp.asarray(whole.astype(np.float32)))))
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


def _batches(prompts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, which are real) [B, T] of prompts of similar lengths, in few shapes."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for prompt in prompts:
        length = max(_SHORTEST, 2 ** math.ceil(math.log2(max(1, len(prompt)))))
        by_length.setdefault(length, []).append(prompt)
    found = []
    for length, members in sorted(by_length.items()):
        rows = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(members), rows):
            tokens = np.zeros((rows, length), np.int64)
            mask = np.zeros((rows, length), bool)
            for row, prompt in enumerate(members[first : first + rows]):
                tokens[row, : len(prompt)] = prompt
                mask[row, : len(prompt)] = True
            found.append((tokens, mask))
    return found
