"""Shared by the scripts of all clients: the questions, and a report of each task.

A script runs in its client's own environment, without this repository's packages.
"""

import json
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

COUNTRY = r"^The country of [A-Za-z ]{1,40} is [A-Za-z ]{1,40}\.$"
"""Sentences that a form admits. The model was not trained to fill in forms: what it writes there
must fit the form, and need not be true."""


def is_sentence(text: str) -> bool:
    """Whether a form's sentence fits it."""
    return re.fullmatch(COUNTRY, text) is not None


class Column(StrEnum):
    """An enum, which schemas refer to."""

    COUNTRY = "country"
    AGE = "age"


@dataclass(frozen=True)
class Asked:
    """The questions about a table and their right answers.

    Attributes:
        url: of the server, without a path.
        model: its name.
        tokenizer: folder of its tokenizer, for clients that count tokens themselves.
        system: system message with the table.
        country_question, country_answer: of the first turn.
        age_question, age_answer: of the second turn, about the same person.
        model_folder: of the checkpoint that is served, for trainers.
    """

    url: str
    model: str
    tokenizer: str
    system: str
    country_question: str
    country_answer: str
    age_question: str
    age_answer: str
    model_folder: str = ""

    @property
    def first_turn(self) -> list[dict[str, str]]:
        """Messages of the first turn."""
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.country_question},
        ]

    def second_turn(self, answer: str) -> list[dict[str, str]]:
        """Messages of the second turn, after ``answer`` in the first."""
        return [
            *self.first_turn,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self.age_question},
        ]


def asked() -> Asked:
    """The first argument of the command line, a JSON object."""
    return Asked(**json.loads(sys.argv[1]))


def refused(call: Callable[[], Any]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("nothing was refused")


def run(*tasks: Callable[[Asked], Any]) -> None:
    """Run every task, or those that the command line names after the questions, and print one JSON
    object: each task's name, with its traceback or null."""
    given = asked()
    names = sys.argv[2:] or [task.__name__ for task in tasks]
    report: dict[str, str | None] = {}
    for task in (task for task in tasks if task.__name__ in names):
        try:
            task(given)
        except Exception:
            report[task.__name__] = traceback.format_exc()
        else:
            report[task.__name__] = None
    print(json.dumps(report))
