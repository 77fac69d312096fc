"""Typing errors in questions."""

import dataclasses
import random
import re
import string

from bench.train_bundled_model.questions import Question
from bench.train_bundled_model.table import Table

_WORD = re.compile(r"[A-Za-z]{4,}")


def mistyped(rng: random.Random, question: Question, table: Table) -> Question:
    """The question with typing errors in one to three of its words, and the same answer.

    Some begin with a small letter and end without a mark.

    Words that are in cells of the table, or in the answer to a count, have none: an answer copies
    them as they are written.
    """
    copied = [cell for row in table.rows for cell in row]
    if question.kind == "count":
        copied.append(question.answer)
    kept = {
        word.casefold()
        for text in copied
        for word in _WORD.findall(text) + re.findall(r"\w+", text)
    }
    words = [w for w in _WORD.finditer(question.text) if w[0].casefold() not in kept]
    text = question.text
    for word in sorted(rng.sample(words, min(len(words), rng.randint(1, 3))), key=_start)[::-1]:
        text = text[: word.start()] + _with_error(rng, word[0]) + text[word.end() :]
    first = re.match(r"\w+", text)
    if rng.random() < 0.3 and first is not None and first[0].casefold() not in kept:
        text = text[0].lower() + (text[1:-1] if text[-1] in "?." else text[1:])
    return dataclasses.replace(question, text=text)


def _start(word: re.Match[str]) -> int:
    return word.start()


def _with_error(rng: random.Random, word: str) -> str:
    """The word with a letter left out, doubled or wrong, or with two letters in the wrong order."""
    at = rng.randrange(len(word) - 1)
    before, letter, after = word[:at], word[at], word[at + 1 :]
    kind = rng.randrange(4)
    if kind == 0:
        return before + after
    if kind == 1:
        return before + letter + letter + after
    if kind == 2:
        return before + after[0] + letter + after[1:]
    return before + rng.choice(string.ascii_lowercase) + after
