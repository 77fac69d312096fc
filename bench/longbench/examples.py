"""Reading LongBench files and fitting their documents into a model's length."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from bench.longbench.tasks import Task


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One line of a file, with the field names of LongBench."""

    context: str
    input: str
    answers: list[str]
    all_classes: list[str] | None


def read_examples(path: Path, limit: int | None) -> list[Example]:
    """The first ``limit`` examples of a JSON-lines file.

    Raises:
        ValueError: a line is not an example; the message names it.
    """
    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            answers = [str(answer) for answer in row["answers"]]
            if not answers:
                raise KeyError("answers")
            example = Example(row["context"], row.get("input", ""), answers, row.get("all_classes"))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path.name}, line {number}: not an example ({error!r}); it needs 'context' and a "
                "list 'answers', and has 'input' where the task asks something"
            ) from error
        found.append(example)
        if len(found) == limit:
            break
    return found


def split_prompt(task: Task, example: Example) -> tuple[str, str]:
    """The shared prefix and the question of a prompt."""
    return (
        task.shared.replace("{context}", example.context),
        task.question.replace("{input}", example.input),
    )


def shortened(text: str, tokens: int, encode: Callable, decode: Callable) -> str:
    """Truncate the middle of a text that has more tokens than allowed, as LongBench does."""
    ids = encode(text)
    if len(ids) <= tokens:
        return text
    head = tokens // 2
    return decode(ids[:head]) + decode(ids[len(ids) - (tokens - head) :])
