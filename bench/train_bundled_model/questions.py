"""Questions about a table, in varied wordings, with one canonical answer each.

Kinds: ``cell`` (a cell by the person's name), ``row``, ``count``, ``comparison``, and ``lookup`` (a
cell by id, or a name by email).
Answers to counts and comparisons name what was looked up before they conclude, and lists are
numbered, so that each step is a look-up of its own.
"""

import dataclasses
import random
from collections.abc import Callable

from bench.train_bundled_model import wordings
from bench.train_bundled_model.fields import COUNTED
from bench.train_bundled_model.table import Table

KINDS = ("cell", "row", "count", "comparison", "lookup")
Weights = tuple[float, float, float, float, float]  # in the order of KINDS
MAX_LISTED = 15  # a count's answer lists at most this many people


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer.

    Attributes:
        text: the part, with the space before it.
        row: the row of the table that it is taken from, or None.
    """

    text: str
    row: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question with its only accepted answer.

    Attributes:
        kind: one of ``KINDS``.
        topic: for a cell the column asked for; otherwise what is counted or compared.
        text: the question.
        pieces: the answer, in the canonical wording.
    """

    kind: str
    topic: str
    text: str
    pieces: tuple[Piece, ...]

    @property
    def answer(self) -> str:
        """The whole answer."""
        return "".join(piece.text for piece in self.pieces)


def _cell(rng: random.Random, table: Table) -> Question:
    row = rng.randrange(len(table.rows))
    name = table.cell(row, "name")
    column = rng.choice([c for c in table.columns if c != "name"])
    return _asked(rng, "cell", column, wordings.ANY + wordings.BY_NAME, name, name, table, row)


def _lookup(rng: random.Random, table: Table) -> Question | None:
    row = rng.randrange(len(table.rows))
    if rng.random() < 0.25 and "email" in table.columns:
        name, email = table.cell(row, "name"), table.cell(row, "email")
        text = rng.choice(wordings.OWNER).format(key=email)
        pieces = (Piece(f"The name of {email} is {name}.", row),)
        return Question("lookup", "name", text, pieces)
    if "id" not in table.columns:
        return None
    number = table.cell(row, "id")
    column = rng.choice([c for c in table.columns if c != "id"])
    key = rng.choice(wordings.ID_KEYS).format(key=number)
    return _asked(rng, "lookup", column, wordings.ANY, key, f"id {number}", table, row)


def _asked(
    rng: random.Random,
    kind: str,
    column: str,
    templates: tuple[str, ...],
    key: str,
    known: str,
    table: Table,
    row: int,
) -> Question:
    if column in wordings.OWN and rng.random() < 0.3:
        templates = wordings.OWN[column]
    text = rng.choice(templates).format(word=rng.choice(wordings.WORDS[column]), key=key)
    answer = f"The {column} of {known} is {table.cell(row, column)}."
    return Question(kind, column, text, (Piece(answer, row),))


def _row(rng: random.Random, table: Table) -> Question:
    row = rng.randrange(len(table.rows))
    text = rng.choice(wordings.ROW).format(key=table.cell(row, "name"))
    return Question("row", "row", text, (Piece(f"Here is the row:\n{table.line(row)}", row),))


def _listed(topic: str, text: str, title: str, table: Table, found: list[int]) -> Question:
    pieces = [Piece(f"{title}:", found[0] if found else None)]
    for number, row in enumerate(found, 1):
        pieces.append(Piece(f"{',' * (number > 1)} {number}. {table.cell(row, 'name')}", row))
    end = "." if found else " none."
    pieces.append(Piece(f"{end} Total: {len(found)}."))
    return Question("count", topic, text, tuple(pieces))


def _count_rows(rng: random.Random, table: Table) -> Question:
    pieces = (Piece(f"The table has {len(table.rows)} people."),)
    return Question("count", "people", rng.choice(wordings.ROWS), pieces)


def _count_equal(rng: random.Random, table: Table, column: str) -> Question | None:
    values = table.column(column)
    value = rng.choice(values)
    if rng.random() < 0.3:  # rather a frequent one than a person at random would give
        value = max(set(values), key=lambda v: (values.count(v), v))
    found = [row for row, v in enumerate(values) if v == value]
    if len(found) > MAX_LISTED:
        return None
    article = "an" if value[0].lower() in "aeiou" else "a"
    text = rng.choice(wordings.EQUAL[column]).format(key=value, article=article)
    return _listed(column, text, wordings.EQUAL_TITLES[column].format(key=value), table, found)


def _count_ages(rng: random.Random, table: Table) -> Question | None:
    older = rng.random() < 0.7
    ages = [int(age) for age in table.column("age")]
    few = rng.randint(0, min(MAX_LISTED if rng.random() < 0.3 else 5, len(ages) - 1))
    limit = sorted(ages, reverse=older)[few] + rng.randint(0, 2) * (1 if older else -1)
    if rng.random() < 0.5:
        limit = -(-limit // 5) * 5 if older else limit // 5 * 5
    found = [row for row, age in enumerate(ages) if (age > limit if older else age < limit)]
    if len(found) > MAX_LISTED:
        return None
    templates, word = (wordings.OVER, "Older") if older else (wordings.UNDER, "Younger")
    text = rng.choice(templates).format(key=limit)
    return _listed("age", text, f"{word} than {limit}", table, found)


def _compare_ages(rng: random.Random, table: Table) -> Question:
    one, two = rng.sample(range(len(table.rows)), 2)
    (a, x), (b, y) = ((table.cell(r, "name"), int(table.cell(r, "age"))) for r in (one, two))
    older = rng.random() < 0.75
    end = "both are the same age"
    if x != y:
        end = f"{a if (x > y) == older else b} is {'older' if older else 'younger'}"
    text = rng.choice(wordings.OLDER if older else wordings.YOUNGER).format(a=a, b=b)
    pieces = (Piece(f"{a} is {x}", one), Piece(f" and {b} is {y}", two), Piece(f", so {end}."))
    return Question("comparison", "age", text, pieces)


def _compare_countries(rng: random.Random, table: Table) -> Question:
    one, two = rng.sample(range(len(table.rows)), 2)
    values = table.column("country")
    if rng.random() < 0.4:
        same = [r for r in range(len(values)) if r != one and values[r] == values[one]]
        two = rng.choice(same) if same else two
    a, b = table.cell(one, "name"), table.cell(two, "name")
    end = "yes" if values[one] == values[two] else "no"
    text = rng.choice(wordings.SAME_COUNTRY).format(a=a, b=b)
    pieces = (
        Piece(f"{a} lives in {values[one]}", one),
        Piece(f" and {b} lives in {values[two]}", two),
        Piece(f", so {end}."),
    )
    return Question("comparison", "country", text, pieces)


def _extreme(rng: random.Random, table: Table) -> Question | None:
    ages = [int(a) for a in table.column("age")]
    oldest = rng.random() < 0.5
    age = max(ages) if oldest else min(ages)
    if ages.count(age) > 1:
        return None
    word, how = ("oldest", "highest") if oldest else ("youngest", "lowest")
    text = rng.choice(wordings.OLDEST if oldest else wordings.YOUNGEST)
    row = ages.index(age)
    answer = f"The {how} age is {age}, so the {word} person is {table.cell(row, 'name')}."
    return Question("comparison", word, text, (Piece(answer, row),))


def _counters(table: Table) -> list[Callable[[random.Random, Table], Question | None]]:
    counters: list[Callable[[random.Random, Table], Question | None]] = [_count_rows]
    for column in COUNTED:
        if column in table.columns:
            counters.append(lambda rng, table, c=column: _count_equal(rng, table, c))
    if "age" in table.columns:
        counters.append(_count_ages)
    return counters


def _comparers(table: Table) -> list[Callable[[random.Random, Table], Question | None]]:
    comparers: list[Callable[[random.Random, Table], Question | None]] = []
    if "age" in table.columns:
        comparers += [_compare_ages, _compare_ages, _extreme]
    if "country" in table.columns:
        comparers.append(_compare_countries)
    return comparers


def random_question(rng: random.Random, table: Table, kind: str) -> Question | None:
    """One question of a kind, or None when this draw has none (no such column, no clear answer)."""
    if kind == "cell":
        return _cell(rng, table)
    if kind == "lookup":
        return _lookup(rng, table)
    if kind == "row":
        return _row(rng, table)
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    makers = _counters(table) if kind == "count" else _comparers(table)
    return rng.choice(makers)(rng, table) if makers and len(table.rows) > 1 else None


def random_questions(
    rng: random.Random,
    table: Table,
    count: int,
    weights: Weights = (0.6, 0.06, 0.12, 0.12, 0.1),
) -> list[Question]:
    """``count`` questions about a table, their kinds drawn with the weights."""
    questions: list[Question] = []
    while len(questions) < count:
        question = random_question(rng, table, rng.choices(KINDS, weights)[0])
        if question is not None:
            questions.append(question)
    return questions
