"""GRPO: reinforcement learning of the bundled model, to a higher reward in minutes on a CPU.

The bundled model knows many wordings of questions about a table. Here it learns to understand three
that it often refuses. The reward of an answer is 1 if it gives the right cell, otherwise 0. The
model never sees a right answer: each step samples a group of answers to each question with
`rjax.functional.rollout`, which reads a group's prompt once per decode step, and raises the
log-likelihood of the answers that are better than the mean of their group (Group Relative Policy
Optimization, Shao et al., 2024). The rollout uses the arrays that the optimiser updates; no weights
are copied or converted.

    python -m rjax.examples.grpo
"""

import argparse
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rjax import functional
from rjax.models import BUNDLED_MODEL, load_model
from rjax.tokenization import Tokenizer

PROMPT_TOKENS = 128
NEW_TOKENS = 20
GROUPS, SAMPLES = 4, 8
LEARNING_RATE = 5e-5
QUESTIONS = (("{} is how old?", 1), ("where {} live", 2), ("What is {} working as?", 3))
NAMES = ["Ada", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "June", "Kai", "Lena", "Milo", "Otto"]
COUNTRIES = ["Peru", "Chile", "Kenya", "Japan", "Malta", "Ghana", "Nepal", "Spain"]
JOBS = ["baker", "pilot", "nurse", "lawyer", "farmer", "tailor"]


def draw_task(rng: random.Random, tokenizer: Tokenizer, kind: int) -> tuple[list[int], str]:
    """The prompt of a question of this kind about a table of four people, and the right cell."""
    people = [
        (name, str(rng.randint(20, 80)), rng.choice(COUNTRIES), rng.choice(JOBS))
        for name in rng.sample(NAMES, 4)
    ]
    rows = [("name", "age", "country", "occupation"), ("---",) * 4, *people]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    person = rng.choice(people)
    question, column = QUESTIONS[kind % len(QUESTIONS)]
    text = tokenizer.apply_chat_template(
        [
            {
                "role": "system",
                "content": f"Answer questions about the people in this table.\n\n{table}",
            },
            {"role": "user", "content": question.format(person[0])},
        ]
    )
    return tokenizer.encode(text, add_special_tokens=False), person[column]


def draw_batch(
    rng: random.Random, tokenizer: Tokenizer, count: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Padded prompts [count, PROMPT_TOKENS], their lengths, and the right cells."""
    start = rng.randrange(len(QUESTIONS))
    tasks = [draw_task(rng, tokenizer, start + i) for i in range(count)]
    prompts = np.zeros((count, PROMPT_TOKENS), np.int32)
    for row, (tokens, _) in zip(prompts, tasks, strict=True):
        row[: len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens, _ in tasks], np.int32)
    return prompts, lengths, [cell for _, cell in tasks]


def rewards_of(tokens: np.ndarray, cells: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """1 for each answer [A, n, Z] that ends with the right cell, otherwise 0."""
    return np.array(
        [
            [tokenizer.decode(row[row >= 0].tolist()).endswith(f" {cell}.") for row in group]
            for group, cell in zip(tokens, cells, strict=True)
        ],
        np.float32,
    )


def loss_of(
    setup: functional.Setup, weights: Any, whole: Any, starts: Any, answers: Any, advantages: Any
) -> jax.Array:
    """Policy-gradient loss of B answers, averaged over their tokens.

    The samples come from these weights, so the ratio of GRPO's clipped objective is 1 and its
    gradient is that of the log-likelihood, times the advantage.

    Args:
        setup: the model's static part, from `functional.prepare`.
        weights: the weights to differentiate by.
        whole: prompts with their answers, [B, Q + Z], right-padded.
        starts: position of each answer's first token, [B].
        answers: token ids of the answers, [B, Z], -1 after the end.
        advantages: advantage of each answer, [B].
    """
    logprobs = functional.token_logprobs(setup, weights, whole)
    # Entry i of a row belongs to token i + 1.
    columns = starts[:, None] - 1 + jnp.arange(answers.shape[1])
    live = answers >= 0
    chosen = jnp.take_along_axis(logprobs, columns, axis=1)
    return -jnp.sum(jnp.where(live, chosen * advantages[:, None], 0.0)) / jnp.sum(live)


def with_answers(prompts: np.ndarray, lengths: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Each prompt [B, Q] followed by its answer [B, Z], right-padded to [B, Q + Z]."""
    whole = np.pad(prompts, ((0, 0), (0, answers.shape[1])))
    for row, start, answer in zip(whole, lengths, answers, strict=True):
        row[start : start + answer.size] = np.maximum(answer, 0)
    return whole


def main() -> None:
    """Train, and print the mean reward of held-out questions before and after."""
    parser = argparse.ArgumentParser(prog="python -m rjax.examples.grpo", description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--held-out", type=int, default=6, help=f"batches of {GROUPS} questions to evaluate with"
    )
    arguments = parser.parse_args()
    steps = arguments.steps

    tokenizer = Tokenizer(BUNDLED_MODEL)
    model = load_model(BUNDLED_MODEL, dtype=jnp.float32, progress=False).model
    setup, weights = functional.prepare(model, max_context=PROMPT_TOKENS + NEW_TOKENS, page_size=16)
    sample = jax.jit(
        functools.partial(
            functional.rollout,
            setup,
            samples=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            end_token=sorted(tokenizer.eos_token_ids),
        )
    )
    optimiser = optax.adam(LEARNING_RATE)  # a dependency of flax
    state = optimiser.init(weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, *batch: Any) -> tuple[Any, Any]:
        gradient = jax.grad(functools.partial(loss_of, setup))(weights, *batch)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(weights, change), state

    def evaluate() -> float:
        rng = random.Random("held out")
        found = []
        for i in range(arguments.held_out):
            prompts, lengths, cells = draw_batch(rng, tokenizer, GROUPS)
            keys = jax.random.split(jax.random.key(i), GROUPS)
            tokens = np.asarray(sample(weights, prompts, lengths, keys).tokens)
            found.append(rewards_of(tokens, cells, tokenizer).mean())
        return float(np.mean(found))

    before = evaluate()
    print(f"reward before: {before:.2f}", flush=True)
    rng, recent = random.Random("training"), []
    for step in range(1, steps + 1):
        prompts, lengths, cells = draw_batch(rng, tokenizer, GROUPS)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), step), GROUPS)
        answers = np.asarray(sample(weights, prompts, lengths, keys).tokens)
        rewards = rewards_of(answers, cells, tokenizer)
        spread = rewards.std(axis=1, keepdims=True)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
        rows = np.repeat(np.arange(GROUPS), SAMPLES)
        answers = answers.reshape(len(rows), -1)
        whole = with_answers(prompts[rows], lengths[rows], answers)
        weights, state = update(weights, state, whole, lengths[rows], answers, advantages.ravel())
        recent.append(rewards.mean())
        if step % 5 == 0:
            print(f"steps to {step}: mean reward {np.mean(recent[-5:]):.2f}", flush=True)
    print(f"reward after: {evaluate():.2f}")


if __name__ == "__main__":
    main()
