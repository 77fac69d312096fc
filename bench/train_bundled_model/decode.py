"""Plain greedy decoding of many questions about many tables, without an engine.

Slow and simple: for scores during training and for tests. Each prefix is read once; the branches
are recomputed at every step.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from bench.train_bundled_model.attention import (
    BranchAttention,
    Implementation,
    PrefixAttention,
    branch_mask,
)
from bench.train_bundled_model.tokenizer import END, prefix_text, question_text
from rjax.models.decoder import Decoder


def answer_questions(
    model: Decoder,
    tokenizer: Tokenizer,
    systems: Sequence[str | None],
    questions: Sequence[Sequence[str]],
    *,
    max_new_tokens: int = 120,
    implementation: Implementation = "xla",
    prefix_length: int | None = None,
    question_length: int | None = None,
) -> list[list[str]]:
    """Greedy answers to the questions about each system message, END removed.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        systems: system messages; None for a chat without one.
        questions: equally many questions for each of them.
        max_new_tokens: an answer is cut off after so many tokens.
        implementation: of `jax.nn.dot_product_attention`.
        prefix_length, question_length: tokens to pad to, so that calls share a compiled step; None
            for the longest given.

    Raises ValueError where the questions are not equally many or a text is longer than its padding.
    """
    if len(questions) != len(systems) or len({len(asked) for asked in questions}) != 1:
        raise ValueError("give every system message equally many questions")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    prefixes, lengths = _padded([encode(prefix_text(s)) for s in systems], prefix_length)
    heads, heads_lengths = _padded(
        [encode(question_text(q)) for asked in questions for q in asked], question_length
    )
    B, n = len(systems), len(questions[0])
    branches = np.pad(heads, ((0, 0), (0, max_new_tokens))).reshape(B, n, -1)
    graph, state = nnx.split(model)
    tokens = _decode(
        graph,
        state,
        jnp.asarray(prefixes),
        jnp.asarray(lengths),
        jnp.asarray(branches),
        jnp.asarray(heads_lengths.reshape(B, n)),
        end=tokenizer.token_to_id(END),
        implementation=implementation,
    )
    answers = []
    for row, length in zip(np.asarray(tokens).reshape(B * n, -1), heads_lengths, strict=True):
        ids = row[length : length + max_new_tokens].tolist()
        end = tokenizer.token_to_id(END)
        answers.append(tokenizer.decode(ids[: ids.index(end)] if end in ids else ids))
    return [answers[b * n : (b + 1) * n] for b in range(B)]


def _padded(
    ids: list[list[int]], length: int | None
) -> tuple[Int[np.ndarray, "X Y"], Int[np.ndarray, " X"]]:
    lengths = np.array([len(one) for one in ids], np.int32)
    longest = int(lengths.max())
    if length is not None and longest > length:
        raise ValueError(f"a text has {longest} tokens; the padded length is {length}")
    padded = np.zeros((len(ids), length or longest), np.int32)
    for row, one in zip(padded, ids, strict=True):
        row[: len(one)] = one
    return padded, lengths


@functools.partial(jax.jit, static_argnames=("end", "implementation"))
def _decode(
    graph: nnx.GraphDef,
    state: Any,
    prefixes: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    branches: Int[Array, "B Q Y"],
    heads: Int[Array, "B Q"],
    *,
    end: int,
    implementation: Implementation,
) -> Int[Array, "B Q Y"]:
    """The branches with their answers filled in behind the first ``heads`` tokens of each."""
    model: Decoder = nnx.merge(graph, state)
    B, P = prefixes.shape
    _, n, room = branches.shape
    prefix = PrefixAttention(B, implementation)
    model(prefixes.reshape(-1), jnp.tile(jnp.arange(P), B), prefix)
    segments = jnp.broadcast_to(jnp.repeat(jnp.arange(1, n + 1), room), (B, n * room))
    attention = BranchAttention(
        prefix.keys, prefix.values, branch_mask(lengths, segments, P), implementation
    )
    positions = (lengths[:, None, None] + jnp.arange(room) + jnp.zeros((n, 1), jnp.int32)).reshape(
        -1
    )
    most = room - jnp.max(heads)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tokens, done, made = carry
        hidden = model(tokens.reshape(-1), positions, attention).reshape(B, n, room, -1)
        last = (heads + made - 1)[..., None, None]
        logits = model.logits(jnp.take_along_axis(hidden, last, axis=2).reshape(B * n, -1))
        new = jnp.where(done, 0, jnp.argmax(logits, -1).reshape(B, n))
        here = jnp.arange(room) == (heads + made)[..., None]
        return jnp.where(here, new[..., None], tokens), done | (new == end), made + 1

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        _, done, made = carry
        return ~done.all() & (made < most)

    start = (branches, jnp.zeros((B, n), bool), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unfinished, step, start)[0]
