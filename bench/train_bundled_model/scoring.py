"""Exact-match scores of answers to held-out questions, independent of who answered them."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from bench.train_bundled_model.mistyped import mistyped
from bench.train_bundled_model.questions import Question, Weights, random_questions
from bench.train_bundled_model.table import INTRODUCTIONS, random_table, system_prompt
from bench.train_bundled_model.unrelated import (
    random_introduction,
    tableless_question,
    tableless_system,
    unrelated_question,
)
from bench.train_bundled_model.words import Pool

EVALUATION_SEED = 20_000_003


@dataclasses.dataclass(frozen=True, slots=True)
class Sheet:
    """A system message, questions, and the rows of the table in it; 0 where it has none."""

    system: str | None
    questions: tuple[Question, ...]
    rows: int


def held_out_sheets(
    tables: int,
    questions: int,
    *,
    rows: tuple[int, int] = (5, 40),
    seed: int = EVALUATION_SEED,
    weights: Weights = (0.6, 0.06, 0.12, 0.12, 0.1),
    which: Pool = "real",
    errors: bool = False,
    plain: bool = False,
) -> list[Sheet]:
    """Random tables whose names and words training never saw, with ``questions`` each.

    With ``errors`` the questions have typing errors and are of the kind "mistyped". With ``plain``
    half of the tables have no ids, half have people with a first name only, their introductions say
    nothing of a table, and the questions are of the kind "plain".
    """
    sheets = []
    for at in range(tables):
        rng = random.Random(seed + at)
        table = random_table(rng, rng.randint(*rows), which=which, plain=0.5 if plain else 0.0)
        asked = random_questions(rng, table, questions, weights)
        if plain:
            asked = [dataclasses.replace(q, kind="plain", topic=q.kind) for q in asked]
        if errors:
            wrong = [mistyped(rng, question, table) for question in asked]
            asked = [dataclasses.replace(q, kind="mistyped", topic=q.kind) for q in wrong]
        introduction = random_introduction(rng, which) if plain else rng.choice(INTRODUCTIONS)
        sheets.append(Sheet(system_prompt(table, introduction), tuple(asked), len(table.rows)))
    return sheets


def tableless_sheets(
    count: int, questions: int, *, seed: int = EVALUATION_SEED, which: Pool = "real"
) -> list[Sheet]:
    """Chats without a table, in turn with held-out tables about which nothing is asked."""
    sheets = []
    for at in range(count):
        rng = random.Random(f"{seed} {at}")
        if at % 2:
            table = random_table(rng, rng.randint(5, 40), which=which)
            asked = tuple(unrelated_question(rng, which) for _ in range(questions))
            system = system_prompt(table, rng.choice(INTRODUCTIONS))
            sheets.append(Sheet(system, asked, len(table.rows)))
            continue
        asked = tuple(tableless_question(rng, which) for _ in range(questions))
        sheets.append(Sheet(tableless_system(rng, which), asked, 0))
    return sheets


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How many of the questions of a group were answered exactly."""

    right: int
    asked: int

    @property
    def accuracy(self) -> float:
        """Share of exact answers; 0 for an empty group."""
        return self.right / self.asked if self.asked else 0.0

    def as_json(self) -> dict[str, float | int]:
        """The figures of this group."""
        return {"accuracy": round(self.accuracy, 4), "right": self.right, "asked": self.asked}


def is_right(question: Question, answer: str) -> bool:
    """Whether an answer is the canonical one, white space at its ends aside."""
    return answer.strip() == question.answer


def score(results: Iterable[tuple[Question, bool]]) -> dict[str, Score]:
    """Scores by kind ("cell") and by kind and topic ("cell/email"), sorted by name."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for question, right in results:
        for group in (question.kind, f"{question.kind}/{question.topic}"):
            counts[group][0] += right
            counts[group][1] += 1
    return {name: Score(*counts[name]) for name in sorted(counts)}


def score_by_rows(
    sheets: Sequence[Sheet], right: Sequence[Sequence[bool]], width: int = 10
) -> dict[str, Score]:
    """Scores of cell questions by the size of the table, in bins of ``width`` rows."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for sheet, marks in zip(sheets, right, strict=True):
        for question, mark in zip(sheet.questions, marks, strict=True):
            if question.kind == "cell":
                counts[(sheet.rows - 1) // width][0] += mark
                counts[(sheet.rows - 1) // width][1] += 1
    return {
        f"cell, {at * width + 1} to {(at + 1) * width} rows": Score(*counts[at])
        for at in sorted(counts)
    }


def summary(scores: dict[str, Score]) -> str:
    """The scores as aligned lines of text."""
    return "\n".join(
        f"{name:28s} {100 * s.accuracy:6.2f} %  {s.right} of {s.asked}"
        for name, s in scores.items()
    )
