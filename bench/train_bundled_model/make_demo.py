"""Writes the demo of `python -m rjax.generate`: a table of people, and questions with answers.

python -m bench.train_bundled_model.make_demo
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

from bench.train_bundled_model import fields
from bench.train_bundled_model.questions import Question, random_question
from bench.train_bundled_model.table import Table, random_table, system_prompt
from rjax.models.tables.demo import DEMO_FILE

_SEED = 7
_QUESTIONS_SEED = 14
_ROWS = 24
_LONGEST = 8  # pieces of an answer


@functools.cache
def demo_table() -> Table:
    """The demo's table: 24 people whose names training never saw, columns in the usual order."""
    drawn = random_table(random.Random(_SEED), _ROWS, which="real", all_columns=1.0, extra=0.0)
    order = [drawn.columns.index(column) for column in fields.COLUMNS]
    return Table(fields.COLUMNS, tuple(tuple(row[at] for at in order) for row in drawn.rows))


def demo() -> dict[str, Any]:
    """The content of the file.

    The model answers all of the questions correctly, so that a wrong answer points to the
    installation. Counts are of few people: the model is less certain of many.
    """
    rng = random.Random(_QUESTIONS_SEED)
    kinds = {"cell": 10, "row": 1, "count": 3, "comparison": 2}
    questions = [question for kind, count in kinds.items() for question in _drawn(rng, count, kind)]
    return {
        "system_prompt": system_prompt(demo_table()),
        "questions": [[question.text, question.answer] for question in questions],
    }


def main(path: Path = DEMO_FILE) -> None:
    """Write the file."""
    path.write_text(json.dumps(demo(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _drawn(rng: random.Random, count: int, kind: str) -> list[Question]:
    found: dict[str, Question] = {}
    while len(found) < count:
        question = random_question(rng, demo_table(), kind)
        if question is not None and len(question.pieces) <= _LONGEST:
            found.setdefault(question.text, question)
    return list(found.values())


if __name__ == "__main__":
    main()
