"""One optimizer step, and the check of a batch's answers: the compiled part of training."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from optax.contrib import MuonDimensionNumbers

from bench.train_bundled_model.attention import Implementation, TreeAttention, branch_mask
from bench.train_bundled_model.data import Batch
from bench.train_bundled_model.rows import mean, row_losses
from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.operations import Residual
from rjax.models.rope import rotary_tables

Arrays = dict[str, Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """How much each part counts in the loss; each is averaged by itself.

    Attributes:
        answer, question, table: prediction of the next token in each of them.
        row: telling the tokens of one row from other rows' (`row_losses`).
        pointer: finding the row that the next token is taken from (`row_losses`).
        ordinal: numbering the rows (`row_losses`).

    The last three help at the start of training; they decay to zero by the end of the run.
    """

    answer: float = 1.0
    question: float = 0.05
    table: float = 0.15
    row: float = 0.2
    pointer: float = 0.2
    ordinal: float = 0.05

    def at(self, progress: Array) -> dict[str, Array | float]:
        """The weights by name when a share ``progress`` of the run is over."""
        weights = dataclasses.asdict(self)
        fading = {name: weights[name] * (1 - progress) for name in ("row", "pointer", "ordinal")}
        return weights | fading


def arrays(batch: Batch) -> dict[str, np.ndarray]:
    """A batch's arrays, as the compiled functions take them."""
    return {
        f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "questions"
    }


def fresh_parameters(config: ModelConfig, seed: int) -> tuple[nnx.GraphDef, Any]:
    """Float32 parameters to start from.

    Matrices are normal with variance 1 / (their inputs), those that write to the residual stream
    divided by 2L as well; the embedding has deviation 0.02.
    """
    graph, state = nnx.split(Decoder(config, jnp.float32))
    key = jax.random.key(seed)
    filled = []
    for at, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        module, shape = str(path[-2]), leaf.get_value().shape
        if leaf.get_metadata("initial") != "normal":
            filled.append((path, leaf.replace(jnp.ones(shape, jnp.float32))))
            continue
        if module == "embedding":
            deviation = 0.02
        elif module in ("output", "down"):
            deviation = (np.prod(shape[:-1]) * 2 * config.num_layers) ** -0.5
        else:
            deviation = shape[0] ** -0.5
        value = deviation * jax.random.normal(jax.random.fold_in(key, at), shape, jnp.float32)
        filled.append((path, leaf.replace(value)))
    return graph, nnx.from_flat_state(filled)


_MATRICES = {
    # Each head's, and each of gate and up, is a matrix of its own.
    "qkv": MuonDimensionNumbers(reduction_axis=0, output_axis=3),
    "output": MuonDimensionNumbers(reduction_axis=1, output_axis=2),
    "up": MuonDimensionNumbers(reduction_axis=0, output_axis=2),
    "down": MuonDimensionNumbers(reduction_axis=0, output_axis=1),
}


def _matrices(state: Any) -> Any:
    """Which weights Muon updates, and along which axes; None where Adam does."""

    def axes(path: tuple[Any, ...], leaf: Array) -> MuonDimensionNumbers | None:
        names = [str(getattr(key, "key", key)) for key in path]
        return next((_MATRICES[name] for name in names if name in _MATRICES), None)

    return jax.tree.map_with_path(axes, state)


def optimizer(
    learning_rate: float, steps: int, warm_up: int = 200, decay: float = 0.4
) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for the rest, with the scale of Adam's updates for both.

    Linear warm-up, constant, linear decay to 2 % over the last ``decay`` of the steps. Muon:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; its scale: Liu et al. 2025,
    arXiv:2502.16982.
    """
    falling = max(1, int(steps * decay))
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warm_up),
            optax.constant_schedule(learning_rate),
            optax.linear_schedule(learning_rate, 0.02 * learning_rate, falling),
        ],
        [warm_up, steps - falling],
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            weight_decay=0.05,
            adam_b2=0.98,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_matrices,
        ),
    )


@jax.custom_vjp
def _lookup(table: Float[Array, "V D"], tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
    return jnp.take(table, tokens, axis=0, mode="clip")


def _lookup_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return _lookup(table, tokens), (table, tokens)


def _lookup_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, tokens = saved
    # A scatter-add would sum thousands of occurrences of one token in bfloat16.
    one_hot = jax.nn.one_hot(tokens, table.shape[0], dtype=gradient.dtype)
    summed = jnp.einsum("TV,TD->VD", one_hot, gradient, preferred_element_type=jnp.float32)
    return summed.astype(table.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def hidden_states(
    model: Decoder, batch: Arrays, implementation: Implementation
) -> tuple[Float[Array, "B X D"], list[Float[Array, "B X D"]]]:
    """Final hidden states of prefix and branches, and the residual stream after every layer.

    The model's own call but for `_lookup`.
    """
    prefix, lengths = batch["prefix"].astype(jnp.int32), batch["lengths"]
    B, P = prefix.shape
    tokens = jnp.concatenate([prefix, batch["tokens"].astype(jnp.int32)], 1)
    positions = jnp.concatenate(
        [
            jnp.broadcast_to(jnp.arange(P), (B, P)),
            lengths[:, None] + batch["offsets"].astype(jnp.int32),
        ],
        1,
    ).reshape(-1)
    config = model.config
    assert config.rope is not None
    rotary = rotary_tables(config.rope, positions)
    attention = TreeAttention(P, branch_mask(lengths, batch["segments"], P), implementation)
    residual = Residual(_lookup(model.embedding.weight[...], tokens.reshape(-1)))
    stream = []
    for layer in model.layers:
        residual = layer(residual, rotary, attention)
        stream.append(residual.total().reshape(*tokens.shape, -1))
    return model.norm(residual.total()).reshape(*tokens.shape, -1), stream


def _loss(state: Any, trainer: "Trainer", batch: Arrays, progress: Array) -> tuple[Array, Arrays]:
    model = trainer.model(state)
    hidden, stream = hidden_states(model, batch, trainer.implementation)
    P = batch["prefix"].shape[1]

    def cross_entropy(hidden: Array, targets: Array) -> tuple[Array, Array]:
        logits = model.logits(hidden.reshape(-1, hidden.shape[-1]))
        flat = targets.reshape(-1).astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, flat)
        return losses.reshape(targets.shape), (logits.argmax(-1) == flat).reshape(targets.shape)

    table_losses, _ = cross_entropy(hidden[:, : P - 1], batch["prefix"][:, 1:])
    in_table = jnp.arange(1, P) < batch["lengths"][:, None]
    segments, answers = batch["segments"][:, :-1], batch["answers"][:, :-1]
    losses, right = cross_entropy(hidden[:, P:-1], batch["tokens"][:, 1:])
    in_question = (segments > 0) & (segments == batch["segments"][:, 1:]) & ~answers
    metrics = {
        "answer": mean(losses, answers),
        "question": mean(losses, in_question),
        "table": mean(table_losses, in_table),
        "accuracy": mean(right, answers),
    }
    metrics |= row_losses(state["pointers"], stream, batch, trainer.newline)
    weights = trainer.weights.at(progress)
    loss = sum(weight * metrics[kind] for kind, weight in weights.items())
    return jnp.asarray(loss), metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Trainer:
    """The compiled functions of a training run.

    Attributes:
        graph: structure of the model.
        newline: token id of the newline that ends a row.
        transform: the optimizer.
        implementation: of the attention.
        dtype: in which the model computes; parameters and optimizer are float32.
        weights: of the loss.
    """

    graph: nnx.GraphDef
    newline: int
    transform: optax.GradientTransformation
    implementation: Implementation
    dtype: Any = jnp.bfloat16
    weights: Weights = Weights()

    def model(self, state: Any) -> Decoder:
        """The model of a training state, in the compute dtype."""
        parameters = jax.tree.map(lambda leaf: leaf.astype(self.dtype), state["model"])
        return nnx.merge(self.graph, parameters)

    def update(
        self, state: Any, moments: optax.OptState, batch: Arrays, progress: Array
    ) -> tuple[Any, optax.OptState, Arrays]:
        """One step of a data-parallel run, on one device's share of the batch.

        To be run under `jax.shard_map` with a mesh axis ``data``. All gradients are summed as one
        vector: one collective a step.
        """
        result = jax.grad(_loss, has_aux=True)(state, self, batch, progress)
        flat, unravel = ravel_pytree(result)
        gradient, metrics = unravel(jax.lax.pmean(flat, "data"))
        metrics["norm"] = optax.tree.norm(gradient)
        updates, moments = self.transform.update(gradient, moments, state)
        return optax.apply_updates(state, updates), moments, metrics  # pyright: ignore

    def correct(self, state: Any, batch: Arrays) -> Bool[Array, "B Q"]:
        """Which branch tokens are followed by the argmax of the logits.

        An answer with only correct tokens is the one that greedy decoding gives.
        """
        model = self.model(state)
        P = batch["prefix"].shape[1]
        hidden = hidden_states(model, batch, self.implementation)[0][:, P:]
        logits = model.logits(hidden.reshape(-1, hidden.shape[-1]))
        following = jnp.roll(batch["tokens"], -1, axis=1).astype(jnp.int32)
        return logits.argmax(-1).reshape(following.shape) == following


def replicated(tree: Any, mesh: Mesh) -> Any:
    """The arrays of a tree, replicated on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def compiled(
    function: Any,
    mesh: Mesh,
    split_axes: tuple[bool, ...],
    donate: tuple[int, ...],
    *arguments: Any,
) -> Any:
    """A function compiled for the shapes of its arguments, on all devices of a mesh.

    Args:
        function: computes on one device's share of the arguments.
        mesh: with one axis, ``data``.
        split_axes: which arguments, and in the last entry whether the result, are sharded along
            their first axis; the others are replicated.
        donate: arguments whose memory may be used for the results.
        arguments: examples.
    """
    specs = tuple(PartitionSpec("data") if one else PartitionSpec() for one in split_axes)
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1], check_vma=False
    )
    shapes = [
        jax.tree.map(
            lambda x, s=spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, s)
            ),
            argument,
        )
        for spec, argument in zip(specs, arguments, strict=False)
    ]
    return functools.partial(jax.jit, donate_argnums=donate)(sharded).lower(*shapes).compile()
