"""Questions about a table, in varied wordings, with one canonical answer each.

Kinds: ``cell`` (a cell by the person's name), ``row``, ``count``, ``comparison``, and ``lookup`` (a
cell by id, or a name by email).
Two-step questions (counts, comparisons) have answers that name what was looked up before they
conclude, which is also what makes them learnable.
"""

import dataclasses
import random
from collections.abc import Callable

from models.tables.table import Table

KINDS = ("cell", "row", "count", "comparison", "lookup")
Weights = tuple[float, float, float, float, float]  # in the order of KINDS
MAX_LISTED = 6  # a count's answer lists at most so many people


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """One question with its only accepted answer.

    Attributes:
        kind: one of ``KINDS``.
        topic: for a cell the column asked for; otherwise what is counted or compared.
        text: the question.
        answer: the answer, in the canonical wording.
        row: the row it is about, where it is about just one.
    """

    kind: str
    topic: str
    text: str
    answer: str
    row: int | None = None


_WORDS = {
    "id": ("id", "id", "ID", "id number", "identifier"),
    "name": ("name", "name", "full name"),
    "age": ("age", "age", "age in years"),
    "occupation": ("occupation", "occupation", "job", "profession"),
    "country": ("country", "country", "country of residence", "home country"),
    "email": ("email", "email", "email address", "e-mail"),
    "phone": ("phone", "phone number", "telephone number", "number to call"),
    "address": ("address", "address", "street address", "postal address"),
}
_ANY = (
    "What is the {word} of {key}?",
    "What is the {word} of {key}?",
    "what is the {word} of {key}",
    "What's the {word} of {key}?",
    "Tell me the {word} of {key}.",
    "Give me the {word} of {key}.",
    "Please give me the {word} of {key}.",
    "Can you tell me the {word} of {key}?",
    "I need the {word} of {key}.",
    "Find the {word} of {key}.",
    "Look up the {word} of {key}.",
    "Which {word} does {key} have?",
    "What {word} is listed for {key}?",
    "The {word} of {key}?",
)
_BY_NAME = (
    "What is {key}'s {word}?",
    "What is {key}'s {word}?",
    "Do you know {key}'s {word}?",
    "{key}'s {word}?",
    "{key}: {word}?",
    "For {key}, what is the {word}?",
)
_OWN = {
    "age": ("How old is {key}?", "How many years old is {key}?"),
    "occupation": (
        "What does {key} do for a living?",
        "What does {key} do?",
        "What is {key}'s job?",
        "What does {key} work as?",
    ),
    "country": (
        "Where does {key} live?",
        "In which country does {key} live?",
        "Which country is {key} from?",
        "Where is {key} from?",
    ),
    "email": (
        "How can I email {key}?",
        "Where can I write an email to {key}?",
        "How do I reach {key} by email?",
    ),
    "phone": (
        "How can I call {key}?",
        "How do I reach {key} by phone?",
        "Which number do I call for {key}?",
    ),
    "address": (
        "What street does {key} live on?",
        "Where do I send a letter to {key}?",
        "Where should a parcel for {key} go?",
    ),
}
_OWNER = (
    "Who has the email {key}?",
    "Whose email is {key}?",
    "Who uses the email address {key}?",
    "Which person has the email {key}?",
)
_ID_KEYS = ("person {key}", "id {key}", "the person with id {key}", "number {key}")
_ROW = (
    "Show the row of {key}.",
    "Show me the row of {key}.",
    "Give me everything about {key}.",
    "What do you know about {key}?",
    "Print the full row for {key}.",
    "Tell me all about {key}.",
    "What does the table say about {key}?",
)
_ROWS = (
    "How many people are in the table?",
    "How many rows does the table have?",
    "How many people are listed?",
    "Count the people in the table.",
    "What is the number of people?",
)
_FROM = (
    "How many people live in {key}?",
    "How many people are from {key}?",
    "Count the people from {key}.",
    "What is the number of people in {key}?",
    "How many are from {key}?",
)
_WORKING = (
    "How many people work as {article} {key}?",
    "Count the people whose occupation is {key}.",
    "How many have the occupation {key}?",
    "How many people have the job {key}?",
)
_OVER = (
    "How many people are older than {key}?",
    "How many people are over {key}?",
    "Count the people older than {key}.",
)
_OLDER = (
    "Who is older, {a} or {b}?",
    "Which of {a} and {b} is older?",
    "Is {a} older than {b}?",
    "Compare the ages of {a} and {b}.",
)
_YOUNGER = (
    "Who is younger, {a} or {b}?",
    "Which of {a} and {b} is younger?",
    "Is {a} younger than {b}?",
)
_SAME_COUNTRY = (
    "Do {a} and {b} live in the same country?",
    "Are {a} and {b} from the same country?",
)
_OLDEST = ("Who is the oldest person?", "Who is the oldest?", "Which person is the oldest?")
_YOUNGEST = ("Who is the youngest person?", "Who is the youngest?", "Which person is the youngest?")


def _cell(rng: random.Random, table: Table) -> Question:
    row = rng.randrange(len(table.rows))
    name = table.cell(row, "name")
    column = rng.choice([c for c in table.columns if c != "name"])
    return _asked(rng, "cell", column, _ANY + _BY_NAME, name, name, table, row)


def _lookup(rng: random.Random, table: Table) -> Question:
    row = rng.randrange(len(table.rows))
    if rng.random() < 0.25 and "email" in table.columns:
        name, email = table.cell(row, "name"), table.cell(row, "email")
        text = rng.choice(_OWNER).format(key=email)
        return Question("lookup", "name", text, f"The name of {email} is {name}.", row)
    number = table.cell(row, "id")
    column = rng.choice([c for c in table.columns if c != "id"])
    key = rng.choice(_ID_KEYS).format(key=number)
    return _asked(rng, "lookup", column, _ANY, key, f"id {number}", table, row)


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
    if column in _OWN and rng.random() < 0.3:
        templates = _OWN[column]
    text = rng.choice(templates).format(word=rng.choice(_WORDS[column]), key=key)
    answer = f"The {column} of {known} is {table.cell(row, column)}."
    return Question(kind, column, text, answer, row)


def _row(rng: random.Random, table: Table) -> Question:
    row = rng.randrange(len(table.rows))
    text = rng.choice(_ROW).format(key=table.cell(row, "name"))
    return Question("row", "row", text, f"Here is the row:\n{table.line(row)}", row)


def _listed(topic: str, text: str, title: str, found: list[str]) -> Question:
    listed = ", ".join(found) if found else "none"
    return Question("count", topic, text, f"{title}: {listed}. Total: {len(found)}.")


def _count_rows(rng: random.Random, table: Table) -> Question:
    return Question(
        "count", "people", rng.choice(_ROWS), f"The table has {len(table.rows)} people."
    )


def _count_equal(rng: random.Random, table: Table, column: str) -> Question | None:
    values = table.column(column)
    value = rng.choice(values)
    found = [table.cell(r, "name") for r, v in enumerate(values) if v == value]
    if len(found) > MAX_LISTED:
        return None
    templates, title = (_FROM, "From") if column == "country" else (_WORKING, "Working as")
    article = "an" if value[0] in "aeiou" else "a"
    text = rng.choice(templates).format(key=value, article=article)
    return _listed(column, text, f"{title} {value}", found)


def _count_older(rng: random.Random, table: Table) -> Question | None:
    ages = sorted((int(a) for a in table.column("age")), reverse=True)
    limit = ages[rng.randint(1, min(4, len(ages) - 1))] + rng.randint(0, 2)
    found = [table.cell(r, "name") for r, a in enumerate(table.column("age")) if int(a) > limit]
    if len(found) > MAX_LISTED:
        return None
    return _listed("age", rng.choice(_OVER).format(key=limit), f"Older than {limit}", found)


def _compare_ages(rng: random.Random, table: Table) -> Question:
    one, two = rng.sample(range(len(table.rows)), 2)
    (a, x), (b, y) = ((table.cell(r, "name"), int(table.cell(r, "age"))) for r in (one, two))
    older = rng.random() < 0.75
    end = "both are the same age"
    if x != y:
        end = f"{a if (x > y) == older else b} is {'older' if older else 'younger'}"
    text = rng.choice(_OLDER if older else _YOUNGER).format(a=a, b=b)
    return Question("comparison", "age", text, f"{a} is {x} and {b} is {y}, so {end}.")


def _compare_countries(rng: random.Random, table: Table) -> Question:
    one, two = rng.sample(range(len(table.rows)), 2)
    values = table.column("country")
    if rng.random() < 0.4:
        same = [r for r in range(len(values)) if r != one and values[r] == values[one]]
        two = rng.choice(same) if same else two
    a, b = table.cell(one, "name"), table.cell(two, "name")
    end = "yes" if values[one] == values[two] else "no"
    text = rng.choice(_SAME_COUNTRY).format(a=a, b=b)
    answer = f"{a} lives in {values[one]} and {b} lives in {values[two]}, so {end}."
    return Question("comparison", "country", text, answer)


def _extreme(rng: random.Random, table: Table) -> Question | None:
    ages = [int(a) for a in table.column("age")]
    oldest = rng.random() < 0.5
    age = max(ages) if oldest else min(ages)
    if ages.count(age) > 1:
        return None
    word = "oldest" if oldest else "youngest"
    text = rng.choice(_OLDEST if oldest else _YOUNGEST)
    name = table.cell(ages.index(age), "name")
    return Question("comparison", word, text, f"The {word} person is {name}, aged {age}.")


def _counters(table: Table) -> list[Callable[[random.Random, Table], Question | None]]:
    counters: list[Callable[[random.Random, Table], Question | None]] = [_count_rows]
    for column in ("country", "occupation"):
        if column in table.columns:
            counters.append(lambda rng, table, c=column: _count_equal(rng, table, c))
    if "age" in table.columns:
        counters.append(_count_older)
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
    """So many questions about a table, their kinds drawn with the weights (order of ``KINDS``)."""
    questions: list[Question] = []
    while len(questions) < count:
        question = random_question(rng, table, rng.choices(KINDS, weights)[0])
        if question is not None:
            questions.append(question)
    return questions
