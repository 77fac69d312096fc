"""The table and questions that the command shows when it is given none."""

import functools
import random

from models.tables import fields
from models.tables.questions import Question, random_question
from models.tables.table import Table, random_table, system_prompt

_SEED = 7
_ROWS = 24


@functools.cache
def demo_table() -> Table:
    """The bundled table: 24 people whose names training never saw, columns in the usual order."""
    drawn = random_table(random.Random(_SEED), _ROWS, which="real", all_columns=1.0, extra=0.0)
    order = [drawn.columns.index(column) for column in fields.COLUMNS]
    return Table(fields.COLUMNS, tuple(tuple(row[at] for at in order) for row in drawn.rows))


def demo_system_prompt() -> str:
    """The system message with the bundled table."""
    return system_prompt(demo_table())


def demo_questions() -> list[tuple[str, str]]:
    """16 questions about the bundled table and their answers: 12 cells, and others.

    None asks for what the model does badly (lists of people, the oldest and the youngest).
    """
    rng = random.Random(_SEED + 1)
    questions = _drawn(rng, 12, "cell", fields.COLUMNS)
    questions += _drawn(rng, 1, "row", ("row",))
    questions += _drawn(rng, 1, "count", ("people",))
    questions += _drawn(rng, 2, "comparison", ("age", "country"))
    return [(question.text, question.answer) for question in questions]


def _drawn(rng: random.Random, count: int, kind: str, topics: tuple[str, ...]) -> list[Question]:
    found: dict[str, Question] = {}
    while len(found) < count:
        question = random_question(rng, demo_table(), kind)
        if question is not None and question.topic in topics:
            found.setdefault(question.text, question)
    return list(found.values())
