"""GRPO with an engine: a trainer in plain JAX that gives the engine its weights after each step.

The task, the reward and the algorithm are those of the example `grpo`, which samples inside its own
jit. Here the trainer has a model of its own, whose parameters have the names of Hugging Face's
checkpoints, and samples with `rjax.LLM`: requests of different lengths run in one batch, and the
samples of a question read its prompt once per decode step. `LLM.update_weights` takes the trainer's
arrays as they are. The engine reports the logprobs of the distribution that it samples from, for
the ratio of GRPO's clipped objective.

    python -m rjax.examples.grpo_with_engine --json grpo.json --png grpo.png
"""

import argparse
import functools
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from rjax import LLM, SamplingParams
from rjax.examples.grpo import (
    GROUPS,
    NEW_TOKENS,
    PROMPT_TOKENS,
    SAMPLES,
    draw_batch,
    rewards_of,
    with_answers,
)
from rjax.inputs import TokensPrompt
from rjax.models import BUNDLED_MODEL
from rjax.outputs import token_chances
from rjax.tokenization import Tokenizer

LEARNING_RATE = 2e-6
CLIP = 0.2

type Parameters = dict[str, jax.Array]


def load_parameters(folder: Path) -> tuple[dict[str, Any], Parameters]:
    """The configuration and the float32 parameters of a Llama checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return config, {
        name: jnp.asarray(array, jnp.float32) for shard in shards for name, array in shard.items()
    }


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Root mean square normalisation of the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of heads [B, T, N, H]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def token_logprobs(config: dict[str, Any], weights: Parameters, tokens: jax.Array) -> jax.Array:
    """The logprob of each token after the first, [B, T - 1], by a Llama model.

    Args:
        config: of the checkpoint.
        weights: by the names of the checkpoint, projections as [outputs, inputs].
        tokens: right-padded, [B, T].
    """
    epsilon, size = config["rms_norm_eps"], config["head_dim"]
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = functools.partial("model.layers.{}.{}.weight".format, layer)
        y = rms_norm(x, weights[own("input_layernorm")], epsilon)
        q, k, v = (
            (y @ weights[own(f"self_attn.{name}_proj")].T).reshape(*y.shape[:2], -1, size)
            for name in "qkv"
        )
        theta = config["rope_theta"]
        y = jax.nn.dot_product_attention(rotate(q, theta), rotate(k, theta), v, is_causal=True)
        x += y.reshape(*y.shape[:2], -1) @ weights[own("self_attn.o_proj")].T
        y = rms_norm(x, weights[own("post_attention_layernorm")], epsilon)
        gate, up = (y @ weights[own(f"mlp.{name}_proj")].T for name in ("gate", "up"))
        x += (jax.nn.silu(gate) * up) @ weights[own("mlp.down_proj")].T
    x = rms_norm(x, weights["model.norm.weight"], epsilon)
    logits = x[:, :-1] @ weights["model.embed_tokens.weight"].T  # tied
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, -1)


def loss_of(
    config: dict[str, Any],
    weights: Parameters,
    whole: jax.Array,
    starts: jax.Array,
    answers: jax.Array,
    old: jax.Array,
    advantages: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """GRPO's clipped loss of the B answers to one question, averaged over their tokens.

    Args:
        config: of the checkpoint.
        weights: the weights to differentiate by.
        whole: prompts with their answers, [B, Q + Z], right-padded.
        starts: position of each answer's first token, [B].
        answers: token ids of the answers, [B, Z], -1 after the end.
        old: the engine's logprobs of the answers' tokens, [B, Z].
        advantages: advantage of each answer, [B].

    Returns:
        The loss, and the largest difference between the logprobs of trainer and engine.
    """
    logprobs = token_logprobs(config, weights, whole)
    columns = starts[:, None] - 1 + jnp.arange(answers.shape[1])
    live = answers >= 0
    change = jnp.where(live, jnp.take_along_axis(logprobs, columns, axis=1) - old, 0.0)
    ratio = jnp.exp(change)
    gain = jnp.minimum(
        ratio * advantages[:, None], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages[:, None]
    )
    loss = -jnp.sum(jnp.where(live, gain, 0.0)) / jnp.sum(live)
    return loss, jnp.max(jnp.abs(change))


def sample(
    llm: LLM, prompts: np.ndarray, lengths: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Answers to A prompts: token ids [A, n, Z], -1 after the end, and their logprobs."""
    params = [
        SamplingParams(
            n=SAMPLES,
            max_tokens=NEW_TOKENS,
            seed=seed * GROUPS + i,
            logprobs=0,
            logprobs_mode="processed_logprobs",
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    given = [
        TokensPrompt(prompt_token_ids=row[:length].tolist())
        for row, length in zip(prompts, lengths, strict=True)
    ]
    answers = np.full((len(prompts), SAMPLES, NEW_TOKENS), -1, np.int32)
    logprobs = np.zeros(answers.shape, np.float32)
    for i, output in enumerate(llm.generate(given, params)):
        for completion in output.outputs:
            assert completion.logprobs is not None
            place = i, completion.index, slice(len(completion.token_ids))
            answers[place] = completion.token_ids
            logprobs[place] = [entry[0][1] for entry in token_chances(completion.logprobs)]
    return answers, logprobs


def main() -> None:
    """Train, and print the mean reward of held-out questions before and after."""
    parser = argparse.ArgumentParser(
        prog="python -m rjax.examples.grpo_with_engine", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--held-out", type=int, default=6, help=f"batches of {GROUPS} questions to evaluate with"
    )
    parser.add_argument("--json", type=Path, help="write the reward of each step to this file")
    parser.add_argument("--png", type=Path, help="plot them; needs matplotlib")
    arguments = parser.parse_args()

    config, weights = load_parameters(BUNDLED_MODEL)
    llm = LLM(
        dtype="float32",
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        page_size=16,
        num_pages=1024,
        max_num_seqs=GROUPS * SAMPLES,
        max_num_batched_tokens=256,
        use_tqdm=False,
    )
    tokenizer = Tokenizer(BUNDLED_MODEL)
    optimiser = optax.adam(LEARNING_RATE)  # a dependency of flax
    state = optimiser.init(weights)

    gradient_of = jax.jit(jax.grad(functools.partial(loss_of, config), has_aux=True))

    @jax.jit
    def apply(weights: Parameters, state: Any, gradients: list[Parameters]) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda *leaves: sum(leaves) / GROUPS, *gradients)
        change, state = optimiser.update(mean, state)
        return optax.apply_updates(weights, change), state

    def evaluate() -> float:
        rng = random.Random("held out")
        found = []
        for i in range(arguments.held_out):
            prompts, lengths, cells = draw_batch(rng, tokenizer, GROUPS)
            answers, _ = sample(llm, prompts, lengths, i)
            found.append(rewards_of(answers, cells, tokenizer).mean())
        return float(np.mean(found))

    before = evaluate()
    print(f"reward before: {before:.2f}", flush=True)
    rng = random.Random("training")
    rewards, differences = [], []
    for number in range(1, arguments.steps + 1):
        prompts, lengths, cells = draw_batch(rng, tokenizer, GROUPS)
        answers, logprobs = sample(llm, prompts, lengths, 1000 + number)
        reward = rewards_of(answers, cells, tokenizer)
        spread = reward.std(axis=1, keepdims=True)
        advantages = (reward - reward.mean(axis=1, keepdims=True)) / (spread + 1e-4)
        gradients = []
        for i in np.flatnonzero(spread[:, 0]):  # of the others, the gradient is zero
            starts = np.full(SAMPLES, lengths[i])
            whole = with_answers(np.repeat(prompts[i : i + 1], SAMPLES, 0), starts, answers[i])
            gradient, difference = gradient_of(
                weights, whole, starts, answers[i], logprobs[i], advantages[i]
            )
            gradients.append(gradient)
            differences.append(float(difference))
        if gradients:
            padding = [jax.tree.map(jnp.zeros_like, weights)] * (GROUPS - len(gradients))
            weights, state = apply(weights, state, gradients + padding)
            llm.update_weights(weights)
        rewards.append(float(reward.mean()))
        if number % 5 == 0 or number == arguments.steps:
            print(
                f"steps to {number}: mean reward {np.mean(rewards[-5:]):.2f}, weights version "
                f"{llm.weights_version}, logprobs of engine and trainer differ by at most "
                f"{max(differences, default=0.0):.1e}",
                flush=True,
            )
    after = evaluate()
    print(f"reward after: {after:.2f}")
    report = {
        "before": before,
        "after": after,
        "rewards": rewards,
        "largest_logprob_difference": max(differences, default=0.0),
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.png is not None:
        plot(report, arguments.png)


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the reward of each step, with the mean of five."""
    from matplotlib.figure import Figure

    rewards = np.array(report["rewards"])
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(rewards) + 1)
    axes.plot(steps, rewards, ".", color="tab:gray", label="one step: 4 questions, 8 answers each")
    mean = [rewards[max(0, i - 4) : i + 1].mean() for i in range(len(rewards))]
    axes.plot(steps, mean, color="tab:blue", label="mean of five steps")
    axes.axhline(report["before"], color="tab:red", ls="--", label="held-out questions, before")
    axes.axhline(report["after"], color="tab:green", ls="--", label="held-out questions, after")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
