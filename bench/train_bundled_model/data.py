"""Training batches: tables with many questions each, tokenised, made by several processes.

One example is a shared prefix (the system message with its table) and many branches (a question
and its answer) that all continue the prefix and do not see each other, just as at inference.
"""

import dataclasses
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int
from tokenizers import Tokenizer

from bench.train_bundled_model.mistyped import mistyped
from bench.train_bundled_model.questions import Question, Weights, random_questions
from bench.train_bundled_model.table import (
    INTRODUCTIONS,
    Table,
    lines_before_rows,
    random_table,
    system_prompt,
)
from bench.train_bundled_model.tokenizer import answer_text, prefix_text, question_text
from bench.train_bundled_model.unrelated import (
    random_introduction,
    tableless_question,
    tableless_system,
    unrelated_question,
)
from bench.train_bundled_model.words import Pool


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The size of one compiled training step, and the tables that fit it.

    Attributes:
        batch: examples a batch.
        prefix: tokens kept for the system message.
        branches: tokens kept for all branches of an example together.
        rows: fewest and most rows of a table.
    """

    batch: int
    prefix: int
    branches: int
    rows: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What is asked beside single questions about a table.

    Attributes:
        tableless: share of examples without a table.
        unrelated: share of messages about something else in the other examples.
        turns: how often a question, or a turn before it, has one more turn before it.
        mistyped: share of questions about a table that have typing errors.
    """

    tableless: float = 0.0
    unrelated: float = 0.0
    turns: float = 0.0
    mistyped: float = 0.0


NOTHING_BESIDE = Beside()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What one batch is drawn from; the same plan always gives the same batch.

    Attributes:
        seed: of everything that is drawn.
        shape: of the batch.
        which: pool of names and words.
        all_columns, key_first, plain: see `table.random_table`; ``plain`` is also the
            share of system messages with an introduction that says nothing of a table.
        kinds: weights of the kinds of questions.
        beside: what else is asked.
    """

    seed: int
    shape: Shape
    which: Pool = "training"
    all_columns: float = 0.75
    key_first: float = 0.0
    plain: float = 0.0
    kinds: Weights = (0.35, 0.07, 0.28, 0.18, 0.12)
    beside: Beside = NOTHING_BESIDE


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of B examples: prefixes of P tokens and packed branches of Q tokens.

    Attributes:
        prefix: prefix tokens, padded with 0.
        lengths: how many of them are real.
        tokens: the branches one after another, padded with 0.
        segments: which branch a token belongs to, from 1; 0 for padding.
        offsets: place of a token in its branch.
        answers: whether the next token exists and belongs to the answer.
        lines: for each token before an answer's token that is taken from a row, the line of the
            prefix (newlines before it) that holds the row; 0 elsewhere.
        first_lines: the line of each prefix that holds its first row.
        questions: the branches' questions, for scoring; empty in training batches.
    """

    prefix: Int[np.ndarray, "B P"]
    lengths: Int[np.ndarray, " B"]
    tokens: Int[np.ndarray, "B Q"]
    segments: Int[np.ndarray, "B Q"]
    offsets: Int[np.ndarray, "B Q"]
    answers: Bool[np.ndarray, "B Q"]
    lines: Int[np.ndarray, "B Q"]
    first_lines: Int[np.ndarray, " B"]
    questions: tuple[tuple[Question, ...], ...] = ()


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _fitting_table(
    rng: random.Random, plan: Plan, tokenizer: Tokenizer
) -> tuple[Table, int, list[int]]:
    """A table whose prefix fits the plan's shape, the line of its first row, and its tokens."""
    rows = rng.randint(*plan.shape.rows)
    while True:
        table = random_table(
            rng,
            rows,
            which=plan.which,
            all_columns=plan.all_columns,
            key_first=plan.key_first,
            plain=plan.plain,
        )
        introduction = rng.choice(INTRODUCTIONS)
        if plan.plain and rng.random() < plan.plain:
            introduction = random_introduction(rng, plan.which)
        ids = _encode(tokenizer, prefix_text(system_prompt(table, introduction)))
        if len(ids) <= plan.shape.prefix:
            return table, lines_before_rows(introduction), ids
        # An unusually wordy table: draw another, with fewer rows if that is allowed.
        rows = max(plan.shape.rows[0], min(rows - 1, rows * plan.shape.prefix // len(ids)))


def _encode_answer(
    tokenizer: Tokenizer, question: Question, first_line: int
) -> tuple[list[int], list[int]]:
    """The tokens of an answer with its end, and the line that each is taken from, or 0."""
    ids: list[int] = []
    lines: list[int] = []
    for piece in question.pieces:
        part = _encode(tokenizer, piece.text)
        ids += part
        lines += [0 if piece.row is None else first_line + piece.row] * len(part)
    end = _encode(tokenizer, answer_text(""))
    return ids + end, lines + [lines[-1]] * len(end)


def _asked(rng: random.Random, plan: Plan, table: Table | None) -> Question:
    if table is None:
        return tableless_question(rng, plan.which)
    if plan.beside.unrelated and rng.random() < plan.beside.unrelated:
        return unrelated_question(rng, plan.which)
    (question,) = random_questions(rng, table, 1, plan.kinds)
    if plan.beside.mistyped and rng.random() < plan.beside.mistyped:
        return mistyped(rng, question, table)
    return question


def _earlier_turns(rng: random.Random, plan: Plan, table: Table | None) -> str:
    """The text of the turns before a question."""
    text = ""
    while plan.beside.turns and rng.random() < plan.beside.turns:
        question = _asked(rng, plan, table)
        text += question_text(question.text) + answer_text(question.answer)
    return text


def make_batch(plan: Plan, tokenizer: Tokenizer, keep_questions: bool = False) -> Batch:
    """The batch of a plan."""
    rng = random.Random(plan.seed)
    B, P, Q = plan.shape.batch, plan.shape.prefix, plan.shape.branches
    prefix = np.zeros((B, P), np.int16)
    lengths, first_lines = np.zeros(B, np.int32), np.zeros(B, np.int32)
    tokens, segments, offsets, lines = (np.zeros((B, Q), np.int16) for _ in range(4))
    answers = np.zeros((B, Q), np.bool_)
    kept: list[tuple[Question, ...]] = []
    for b in range(B):
        table = None
        if plan.beside.tableless and rng.random() < plan.beside.tableless:
            ids = _encode(tokenizer, prefix_text(tableless_system(rng, plan.which)))
            first_line = P  # after all lines
        else:
            table, first_line, ids = _fitting_table(rng, plan, tokenizer)
        prefix[b, : len(ids)] = ids
        lengths[b], first_lines[b] = len(ids), first_line
        at, asked = 0, []
        while True:
            earlier = _earlier_turns(rng, plan, table)
            question = _asked(rng, plan, table)
            head = _encode(tokenizer, earlier + question_text(question.text))
            tail, rows = _encode_answer(tokenizer, question, first_line)
            end = at + len(head) + len(tail)
            if end > Q:
                break
            asked.append(question)
            tokens[b, at:end] = head + tail
            segments[b, at:end] = len(asked)
            offsets[b, at:end] = np.arange(end - at)
            answers[b, at + len(head) - 1 : end - 1] = True
            lines[b, at + len(head) - 1 : end - 1] = rows
            at = end
        kept.append(tuple(asked))
    questions = tuple(kept) if keep_questions else ()
    return Batch(prefix, lengths, tokens, segments, offsets, answers, lines, first_lines, questions)


_worker_tokenizer: list[Tokenizer] = []  # one a worker process, set by its initializer


def _start_worker(path: str) -> None:
    _worker_tokenizer[:] = [Tokenizer.from_file(path)]


def _work(plan: Plan) -> Batch:
    return make_batch(plan, _worker_tokenizer[0])


def batches(plans: Sequence[Plan], tokenizer: Path, workers: int) -> Iterator[Batch]:
    """The batches of many plans, in order; made ahead by worker processes when there are any."""
    if workers == 0:
        loaded = Tokenizer.from_file(str(tokenizer))
        yield from (make_batch(plan, loaded) for plan in plans)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (str(tokenizer),)) as pool:
        window = 4 * workers
        pending = [pool.apply_async(_work, (plan,)) for plan in plans[:window]]
        for at in range(len(plans)):
            batch = pending[at % window].get()
            if at + window < len(plans):
                pending[at % window] = pool.apply_async(_work, (plans[at + window],))
            yield batch
