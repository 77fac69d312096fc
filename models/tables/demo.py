"""The table and questions that the command shows when it is given none."""

import functools
import random

from models.tables import fields
from models.tables.questions import Question, random_question
from models.tables.table import Table, random_table, system_prompt

_SEED = 7
_QUESTIONS_SEED = 14
_ROWS = 24
_LONGEST = 8  # pieces of an answer


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
    """16 questions about the bundled table and their answers: 10 cells, and others.

    The model answers all of these rightly, so that another answer points to the installation.
    Counts are of few people: the model is less sure of many.
    """
    rng = random.Random(_QUESTIONS_SEED)
    kinds = {"cell": 10, "row": 1, "count": 3, "comparison": 2}
    questions = [question for kind, count in kinds.items() for question in _drawn(rng, count, kind)]
    return [(question.text, question.answer) for question in questions]


def _drawn(rng: random.Random, count: int, kind: str) -> list[Question]:
    found: dict[str, Question] = {}
    while len(found) < count:
        question = random_question(rng, demo_table(), kind)
        if question is not None and len(question.pieces) <= _LONGEST:
            found.setdefault(question.text, question)
    return list(found.values())
