"""The one function that runs on the device: tokens in, tokens out, KV written in place."""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rjax.sampling import SampleResult, SamplingState, TokenLogprobs, sample, token_logprobs
from rjax.worker.backend import Backend
from rjax.worker.paged_context import PagedContext
from rjax.worker.step_input import PackedLayout
from rjax.worker.step_shape import StepFeatures

_PROMPT_BLOCK = 64  # prompt rows whose logits are held at once


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


def compile_step(
    graph: Any,
    treedef: Any,
    layout: PackedLayout,
    features: StepFeatures,
    backend: Backend,
    mesh: Mesh,
) -> Callable[..., tuple[StepState, StepResult]]:
    """Make the jitted step for one shape and set of features.

    Its arguments are (leaves, state, packed): the model's flat parameter leaves, the StepState,
    which is donated, and the packed StepInput.
    """

    def step(
        leaves: list[Array], state: StepState, packed: Int[Array, " Z"]
    ) -> tuple[StepState, StepResult]:
        batch = layout.unpack(packed)
        slots, targets = jnp.asarray(batch.slots), jnp.asarray(batch.targets)
        model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        context = PagedContext(state.k_pages, state.v_pages, batch, backend, mesh)
        tokens = jnp.where(batch.token_slot >= 0, state.last_tokens[batch.token_slot], batch.tokens)
        hidden = model(tokens, batch.positions, context)
        live = jnp.asarray(batch.live) > 0
        drawn, sampling = sample(
            model.logits(hidden[batch.sample_row]),
            state.sampling,
            slots,
            live,
            mode=features.sampling,
            num_logprobs=features.num_logprobs,
        )
        written = jnp.where(live, slots, state.last_tokens.shape[0])
        new_state = StepState(
            k_pages=context.k_pages,
            v_pages=context.v_pages,
            sampling=sampling,
            last_tokens=state.last_tokens.at[written].set(drawn.tokens, mode="drop"),
        )
        result = StepResult(
            tokens=drawn.tokens,
            sampled=_sampled_logprobs(drawn) if features.num_logprobs else None,
            prompt=_prompt_logprobs(model, hidden, targets, features),
        )
        return new_state, result

    return jax.jit(step, donate_argnums=1)


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
