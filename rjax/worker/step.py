"""The one function that runs on the device: tokens in, tokens out, KV written in place."""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int, UInt32

from rjax.sampling import SampleResult, SamplingState, TokenLogprobs, sample, token_logprobs
from rjax.worker.backend import Backend
from rjax.worker.kernels import Choice
from rjax.worker.paged_operations import PagedOperations
from rjax.worker.step_input import PackedLayout, StepInput
from rjax.worker.step_shape import StepFeatures

_PROMPT_BLOCK = 64  # prompt rows whose logits are forward_result at once


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """What lives on the device from step to step; donated to each.

    Attributes:
        k_pages, v_pages: one pool a layer.
        sampling: a row for each slot.
        last_tokens: the token last sampled for each slot, input of the next step.
    """

    k_pages: list[Float[Array, "P K S H"]]
    v_pages: list[Float[Array, "P K S H"]]
    sampling: SamplingState
    last_tokens: Int[Array, " slots"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads back, one step late; parts that no request asked for are None.

    Attributes:
        tokens: sampled token of each sequence of the batch; -1 where none was.
        sampled: their logprobs.
        prompt: logprobs of the tokens that follow each of the T rows.
    """

    tokens: Int[Array, " B"]
    sampled: TokenLogprobs | None
    prompt: TokenLogprobs | None


@no_type_check  # JAX rebuilds it with descriptions of arrays for leaves
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """The result of a forward-only step.

    Attributes:
        logits: of each sequence of the batch.
        prompt: as in StepResult.
    """

    logits: Float32[Array, "B V"]
    prompt: TokenLogprobs | None


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
    which is donated, and the packed StepInput. ``traced`` is called with the choices of kernels
    when the step is traced.
    """
    forward = _forward(graph, treedef, layout, features, backend, mesh, traced)

    def step(
        leaves: list[Array], state: StepState, packed: Int[Array, " Z"]
    ) -> tuple[StepState, StepResult]:
        state, forward_result = forward(leaves, state, packed)
        sampling, last_tokens, result = _sampled(
            state.sampling, state.last_tokens, layout.unpack(packed), forward_result, None, features
        )
        written = dataclasses.replace(state, sampling=sampling, last_tokens=last_tokens)
        return written, result

    return jax.jit(step, donate_argnums=1)


def compile_forward_step(
    graph: Any,
    treedef: Any,
    layout: PackedLayout,
    features: StepFeatures,
    backend: Backend,
    mesh: Mesh,
    traced: Callable[[list[Choice]], None] | None = None,
) -> Callable[..., tuple[StepState, ForwardResult]]:
    """Make a jitted forward-only step, with the arguments of ``compile_step``.

    While it runs, the host can read the tokens of the step before it, on which masks depend. It is
    the same for every way to sample.
    """
    forward = _forward(graph, treedef, layout, features, backend, mesh, traced)
    return jax.jit(forward, donate_argnums=1)


def compile_sampling(
    layout: PackedLayout, features: StepFeatures
) -> Callable[..., tuple[SamplingState, Array, StepResult]]:
    """Make the sampling of a forward-only step.

    Its arguments are (sampling, last_tokens, packed, forward_result, bitmask): two fields of the
    StepState, both donated; the packed StepInput; the ForwardResult; and for each sequence the
    tokens that it may take, as in ``SamplingState.allowed``. It returns the new values of the two
    fields and the step's result.
    """

    def finish(
        sampling: SamplingState,
        last_tokens: Int[Array, " slots"],
        packed: Int[Array, " Z"],
        forward_result: ForwardResult,
        bitmask: UInt32[Array, "B W"],
    ) -> tuple[SamplingState, Int[Array, " slots"], StepResult]:
        batch = layout.unpack(packed)
        return _sampled(sampling, last_tokens, batch, forward_result, bitmask, features)

    return jax.jit(finish, donate_argnums=(0, 1))


def _forward(
    graph: Any,
    treedef: Any,
    layout: PackedLayout,
    features: StepFeatures,
    backend: Backend,
    mesh: Mesh,
    traced: Callable[[list[Choice]], None] | None = None,
) -> Callable[..., tuple[StepState, ForwardResult]]:
    """Tokens to logits; KV is written."""

    def forward(
        leaves: list[Array], state: StepState, packed: Int[Array, " Z"]
    ) -> tuple[StepState, ForwardResult]:
        batch = layout.unpack(packed)
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        choices: list[Choice] = []
        operations = PagedOperations(
            state.k_pages, state.v_pages, batch, backend, mesh, choices.append
        )
        tokens = jnp.where(batch.token_slot >= 0, state.last_tokens[batch.token_slot], batch.tokens)
        hidden = model(tokens, batch.positions, operations)
        forward_result = ForwardResult(
            logits=model.logits(hidden[batch.sample_row]),
            prompt=_prompt_logprobs(model, hidden, jnp.asarray(batch.targets), features),
        )
        if traced is not None:
            traced(choices)
        written = dataclasses.replace(state, k_pages=operations.k_pages, v_pages=operations.v_pages)
        return written, forward_result

    return forward


def _sampled(
    sampling: SamplingState,
    last_tokens: Int[Array, " slots"],
    batch: StepInput,
    forward_result: ForwardResult,
    bitmask: UInt32[Array, "B W"] | None,
    features: StepFeatures,
) -> tuple[SamplingState, Int[Array, " slots"], StepResult]:
    """Logits to tokens."""
    slots, live = jnp.asarray(batch.slots), jnp.asarray(batch.live) > 0
    drawn, sampling = sample(
        forward_result.logits,
        sampling,
        slots,
        live,
        mode=features.sampling,
        num_logprobs=features.num_logprobs,
        bitmask=bitmask,
    )
    written = jnp.where(live, slots, last_tokens.shape[0])
    result = StepResult(
        tokens=drawn.tokens,
        sampled=_sampled_logprobs(drawn) if features.num_logprobs else None,
        prompt=forward_result.prompt,
    )
    return sampling, last_tokens.at[written].set(drawn.tokens, mode="drop"), result


def _sampled_logprobs(drawn: SampleResult) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=drawn.logprob,
        rank=drawn.rank,
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
    )


def _prompt_logprobs(
    model: Any, hidden: Float[Array, "T D"], targets: Int[Array, " T"], features: StepFeatures
) -> TokenLogprobs | None:
    if not features.prompt_logprobs:
        return None

    # Logits of a block of rows at a time: all rows' would be T x V.
    blocks = [
        token_logprobs(
            model.logits(hidden[start : start + _PROMPT_BLOCK]),
            targets[start : start + _PROMPT_BLOCK],
            features.num_logprobs,
        )
        for start in range(0, hidden.shape[0], _PROMPT_BLOCK)
    ]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *blocks)
