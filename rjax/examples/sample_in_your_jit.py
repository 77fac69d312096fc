"""Sampling inside your own ``jax.jit``: best of n, in one compiled function.

The function takes the weights as an argument, samples n answers to each prompt, scores them, and
returns the best one. The KV of a prompt is stored once for its n samples and read once per step.

    python -m rjax.examples.sample_in_your_jit
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax import functional
from rjax.models import BUNDLED_MODEL, load_model
from rjax.models.tables.demo import demo_system_prompt
from rjax.tokenization import Tokenizer

SAMPLES, NEW_TOKENS = 8, 32


def best_of(
    setup: functional.Setup,
    end_token: int,
    weights: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The most likely of the samples of each prompt.

    Returns:
        Its tokens [A, Z], -1 after the end, and the mean log-probability of the tokens of each
        sample [A, n], best first.
    """
    found = functional.rollout(
        setup,
        weights,
        prompts,
        lengths,
        keys,
        samples=SAMPLES,
        max_new_tokens=NEW_TOKENS,
        end_token=end_token,
        temperature=2.5,
    )
    score = jnp.sum(jnp.asarray(found.logprobs), axis=-1) / found.lengths
    best = jnp.argmax(score, axis=1)
    tokens = jnp.asarray(found.tokens)[jnp.arange(prompts.shape[0]), best]
    return tokens, jnp.sort(score, axis=1, descending=True)


def main() -> None:
    """Run the example."""
    tokenizer = Tokenizer(BUNDLED_MODEL)
    table = "\n".join(demo_system_prompt().split("\n")[:10])  # the first six people
    questions = ["Who is the oldest person?", "What is Hollie Smigiel's job?"]
    rows = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [
                    {"role": "system", "content": table},
                    {"role": "user", "content": question},
                ]
            ),
            add_special_tokens=False,
        )
        for question in questions
    ]
    lengths = np.array([len(row) for row in rows])
    prompts = np.zeros((len(rows), lengths.max()), np.int32)
    for prompt, row in zip(prompts, rows, strict=True):
        prompt[: len(row)] = row

    model = load_model(BUNDLED_MODEL, dtype=jnp.float32, progress=False).model
    setup, weights = functional.prepare(model, max_context=1024)
    (end_token,) = tokenizer.eos_token_ids
    program = jax.jit(functools.partial(best_of, setup, end_token))
    for seed in range(2):  # the second call compiles nothing
        keys = jax.random.split(jax.random.key(seed), len(rows))
        tokens, scores = program(weights, prompts, lengths, keys)
        for question, row, score in zip(questions, np.asarray(tokens), scores, strict=True):
            text = tokenizer.decode(row[row >= 0].tolist())
            print(f"{question} {text}  (best {score[0]:.2f}, worst {score[-1]:.2f})")


if __name__ == "__main__":
    main()
