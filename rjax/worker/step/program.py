"""The one function that runs on the device: tokens in, tokens out, KV written in place."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int, UInt32

from rjax.models.sharding import partition_spec
from rjax.pallas_kernels.mosaic.emit import EARLY_STARTS
from rjax.sampling import (
    Argmax,
    SampleResult,
    SamplingState,
    TokenLogprobs,
    sample,
    token_logprobs,
)
from rjax.worker.backend import Backend
from rjax.worker.kernels import Choice
from rjax.worker.paged_operations import PagedOperations
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.layout import PackedLayout
from rjax.worker.step.result import StepResult
from rjax.worker.step.state import StepState

_PROMPT_BLOCK = 64  # prompt rows whose logits are computed at once


def logits_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The sharding of the logits [B, V] that a step returns."""
    return NamedSharding(mesh, partition_spec("B V", shape, mesh))


def compile_step(
    graph: Any,
    treedef: Any,
    layout: PackedLayout,
    features: StepFeatures,
    backend: Backend,
    mesh: Mesh,
    traced: Callable[[list[Choice]], None] | None = None,
) -> Callable[..., tuple[StepState, StepResult]]:
    """Make the jitted step for one shape and set of features.

    Its arguments are (leaves, state, packed): the model's flat parameter leaves, the StepState,
    which is donated, and the packed StepInput. Its result has logits and hidden states. ``traced``
    is called with the choices of kernels when the step is traced.
    """

    def step(
        leaves: list[Array], state: StepState, packed: Int[Array, " Z"]
    ) -> tuple[StepState, StepResult]:
        batch = layout.unpack(packed)
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        choices: list[Choice] = []
        operations = PagedOperations(
            state.k_pages,
            state.v_pages,
            batch,
            layout.shape.groups,
            backend,
            mesh,
            choices.append,
            state.peers,
            states=state.states,
            early_weights=EARLY_STARTS,  # they are ``leaves``
        )
        tokens = jnp.where(batch.token_slot >= 0, state.last_tokens[batch.token_slot], batch.tokens)
        hidden = model(tokens, batch.positions, operations)
        logits = model.logits(hidden[batch.sample_row])
        if mesh.size > 1:
            logits = jax.lax.with_sharding_constraint(logits, logits_sharding(logits.shape, mesh))
            hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, PartitionSpec()))
        sampling, last_tokens, result = _sampled(
            state.sampling,
            state.last_tokens,
            jnp.stack([batch.slots, batch.live]),
            logits,
            None,
            features,
            operations.argmax if mesh.size > 1 else None,
        )
        if traced is not None:
            traced(choices)
        pools = operations.k_pages, operations.v_pages
        kept = operations.peers, operations.states
        written = StepState(*pools, sampling, last_tokens, *kept)
        return written, dataclasses.replace(result, logits=logits, hidden=hidden)

    return jax.jit(step, donate_argnums=1)


def compile_prompt_logprobs(
    graph: Any, treedef: Any, num_logprobs: int
) -> Callable[..., TokenLogprobs]:
    """Make the jitted log-probabilities of the prompt tokens of a step.

    Its arguments are (leaves, hidden, targets, temperatures): the model's flat parameter leaves,
    the hidden states of a step, the token that follows each of its T rows, and what divides the
    row's logits. It computes the logits of 64 rows at a time: those of all rows would take T x V.
    """

    def prompt_logprobs(
        leaves: list[Array],
        hidden: Float[Array, "T D"],
        targets: Int[Array, " T"],
        temperatures: Float32[Array, " T"],
    ) -> TokenLogprobs:
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))

        def of_block(
            block: tuple[Float[Array, "X D"], Int[Array, " X"], Float32[Array, " X"]],
        ) -> list[Array]:
            rows, following, heat = block
            logits = model.logits(rows) / heat[:, None]
            return jax.tree.leaves(token_logprobs(logits, following, num_logprobs))

        T = targets.shape[0]
        size = min(T, _PROMPT_BLOCK)
        num_blocks = math.ceil(T / size)
        padding = num_blocks * size - T
        blocks = (
            jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_blocks, size, -1),
            jnp.pad(targets, (0, padding)).reshape(num_blocks, size),
            jnp.pad(temperatures, (0, padding), constant_values=1).reshape(num_blocks, size),
        )
        found = jax.lax.map(of_block, blocks)
        return TokenLogprobs(*[x.reshape(num_blocks * size, *x.shape[2:])[:T] for x in found])

    return jax.jit(prompt_logprobs)


def compile_sampling(
    features: StepFeatures,
) -> Callable[..., tuple[SamplingState, Array, StepResult]]:
    """Make the jitted sampling that replaces the greedy tokens of a step.

    It serves every step with as many sequences. Its arguments are (sampling, last_tokens, rows,
    logits, bitmask): two fields of the StepState, both donated; the sampler slot of each sequence
    and whether it samples, as in StepInput; the logits of the step; and the tokens that each
    sequence may take, as in ``SamplingState.allowed``. It returns the new values of the two fields
    and the step's result.
    """

    def resample(
        sampling: SamplingState,
        last_tokens: Int[Array, " slots"],
        rows: Int[Array, "2 B"],
        logits: Float32[Array, "B V"],
        bitmask: UInt32[Array, "B W"],
    ) -> tuple[SamplingState, Int[Array, " slots"], StepResult]:
        written = _written(rows, last_tokens.shape[0])
        # The step counted its greedy token, which this one replaces.
        num_output = sampling.num_output.at[written].add(-1, mode="drop")
        sampling = dataclasses.replace(sampling, num_output=num_output)
        return _sampled(sampling, last_tokens, rows, logits, bitmask, features)

    return jax.jit(resample, donate_argnums=(0, 1))


def _written(rows: Int[Array, "2 B"], num_slots: int) -> Int[Array, " B"]:
    """The slot of each sequence that samples; beyond the last slot for the others."""
    slots, live = rows
    return jnp.where(live > 0, slots, num_slots)


def _sampled(
    sampling: SamplingState,
    last_tokens: Int[Array, " slots"],
    rows: Int[Array, "2 B"],
    logits: Float32[Array, "B V"],
    bitmask: UInt32[Array, "B W"] | None,
    features: StepFeatures,
    argmax: Argmax | None = None,
) -> tuple[SamplingState, Int[Array, " slots"], StepResult]:
    """Sample tokens from the logits."""
    drawn, sampling = sample(
        logits,
        sampling,
        rows[0],
        rows[1] > 0,
        mode=features.sampling,
        num_logprobs=features.num_logprobs,
        processed_logprobs=features.processed_logprobs,
        bitmask=bitmask,
        argmax=argmax,
    )
    written = _written(rows, last_tokens.shape[0])
    sampled = _sampled_logprobs(drawn) if features.num_logprobs else None
    last_tokens = last_tokens.at[written].set(drawn.tokens, mode="drop")
    return sampling, last_tokens, StepResult(drawn.tokens, sampled)


def _sampled_logprobs(drawn: SampleResult) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=drawn.logprob,
        rank=drawn.rank,
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
    )
