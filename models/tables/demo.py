"""The table and questions that the command shows when it is given none."""

import functools
import random

from models.tables.questions import Question, random_questions
from models.tables.table import Table, random_table, system_prompt

_SEED = 7
_ROWS = 30
_COLUMNS = ("id", "name", "age", "occupation", "country", "email", "phone", "address")


@functools.cache
def demo_table() -> Table:
    """The bundled table: 30 people whose names training never saw, columns in the usual order."""
    drawn = random_table(random.Random(_SEED), _ROWS, held_out=True, all_columns=1.0)
    order = [drawn.columns.index(column) for column in _COLUMNS]
    return Table(_COLUMNS, tuple(tuple(row[at] for at in order) for row in drawn.rows))


def demo_system_prompt() -> str:
    """The system message with the bundled table."""
    return system_prompt(demo_table())


def demo_questions() -> list[tuple[str, str]]:
    """16 questions about the bundled table and their answers: 12 cells, and others."""
    rng = random.Random(_SEED + 1)
    table = demo_table()
    cells: dict[str, Question] = {}
    while len(cells) < 12:
        (question,) = random_questions(rng, table, 1, (1.0, 0.0, 0.0, 0.0, 0.0))
        cells.setdefault(question.text, question)
    rest = [
        random_questions(rng, table, count, weights)
        for count, weights in (
            (1, (0.0, 1.0, 0.0, 0.0, 0.0)),
            (1, (0.0, 0.0, 1.0, 0.0, 0.0)),
            (2, (0.0, 0.0, 0.0, 1.0, 0.0)),
        )
    ]
    return [(q.text, q.answer) for q in [*cells.values(), *(q for part in rest for q in part)]]
