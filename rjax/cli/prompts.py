"""Prompts of a command: from its arguments, from stdin and from files."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from rjax.cli.arguments import SAMPLING_KEYS
from rjax.errors import InvalidRequestError, near_miss

_RECORD_KEYS = ("prompt", "messages", *SAMPLING_KEYS)


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One prompt or conversation, with its own sampling values.

    Attributes:
        prompt: text; None for a conversation.
        messages: the conversation; None for a text.
        sampling: sampling values; they override those of the command line.
        source: name of the prompt in error messages, such as "questions.jsonl:3".
        expected: the correct answer, or None if it is unknown.
    """

    prompt: str | None
    messages: list[Any] | None = None
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "prompt"
    expected: str | None = None

    @property
    def shown(self) -> str:
        """The text to print as the question."""
        if self.prompt is not None:
            return self.prompt
        last = self.messages[-1] if self.messages else None
        return str(last.get("content")) if isinstance(last, Mapping) else ""


def read_text(path: str, what: str) -> str:
    """Read a UTF-8 file.

    Raises:
        InvalidRequestError: the file cannot be read; the message is one line.
    """
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{what} {path}: not UTF-8 text (byte {error.start}); convert it"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"{what} {path}: {reason}") from error


def tasks_of_prompts(prompts: list[str]) -> list[Task]:
    """Tasks for the values of ``--prompt``; "-" reads all of stdin, once.

    Raises:
        InvalidRequestError: an empty prompt, stdin named twice or not UTF-8.
    """
    if prompts.count("-") > 1:
        raise InvalidRequestError("--prompt - is given twice; stdin can be read once")
    found = []
    for i, prompt in enumerate(prompts, start=1):
        source = "stdin" if prompt == "-" else f"--prompt {i}"
        if prompt == "-":
            try:
                prompt = sys.stdin.read().rstrip("\n")
            except UnicodeDecodeError as error:
                raise InvalidRequestError("stdin: not UTF-8 text; convert it") from error
        if not prompt:
            raise InvalidRequestError(f"{source} is empty; give at least one character")
        found.append(Task(prompt, source=source))
    return found


def tasks_of_file(path: str, flag: str = "--prompts-file") -> list[Task]:
    """Tasks of a file with one JSON object per line, or one text per line; blank lines are skipped.

    A file is JSONL if its name ends in .jsonl or .ndjson, or its first line starts with "{".

    Args:
        path: path of the file.
        flag: flag by which the path was given, for messages.

    Raises:
        InvalidRequestError: the file cannot be read, has no prompt, or has an invalid line (the
            message names it as file:line).
    """
    lines = read_text(path, flag).splitlines()
    filled = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not filled:
        raise InvalidRequestError(f"{flag} {path}: holds no prompt; give one a line")
    if path.endswith((".jsonl", ".ndjson")) or filled[0][1].lstrip().startswith("{"):
        return [_task_of_record(line, f"{path}:{i}") for i, line in filled]
    return [Task(line, source=f"{path}:{i}") for i, line in filled]


def _task_of_record(line: str, source: str) -> Task:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InvalidRequestError(f"{source}: bad JSON: {reason}") from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f'{source}: give an object such as {{"prompt": "..."}}')
    for key in record:
        if key not in _RECORD_KEYS:
            near = near_miss(key, _RECORD_KEYS)
            raise InvalidRequestError(f"{source}: unknown field {key!r}; {near}")
    prompt, messages = record.pop("prompt", None), record.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise InvalidRequestError(f"{source}: give either prompt or messages")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise InvalidRequestError(f"{source}: prompt must be a text that is not empty")
    if messages is not None and (not isinstance(messages, list) or not messages):
        raise InvalidRequestError(f"{source}: messages must be a list that is not empty")
    return Task(prompt, messages, record, source)
