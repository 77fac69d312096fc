"""A Markdown table of people, drawn from a random generator."""

import dataclasses
import random

from models.tables import fields, names

INTRODUCTIONS = (
    "Answer questions about the people in this table.",
    "You answer questions about the table below.",
    "You are a helpful assistant. Use this table of people.",
    "Here is a table of people. Answer from it and from nothing else.",
    "This is the staff list.",
    "People:",
)
LINES_BEFORE_ROWS = 4  # of a system message: introduction, empty, column names, rule
_OPTIONAL = tuple(c for c in fields.COLUMNS if c not in ("id", "name"))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Columns in the order shown, and one tuple of cells a row, in the same order."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def cell(self, row: int, column: str) -> str:
        """The cell of one row under a column; ValueError when the table has no such column."""
        return self.rows[row][self.columns.index(column)]

    def column(self, column: str) -> list[str]:
        """All cells of a column, from the top."""
        at = self.columns.index(column)
        return [cells[at] for cells in self.rows]

    def line(self, row: int) -> str:
        """One row as a line of Markdown."""
        return f"| {' | '.join(self.rows[row])} |"

    def markdown(self) -> str:
        """The table as Markdown, without a newline at the end."""
        head = [f"| {' | '.join(self.columns)} |", f"|{' --- |' * len(self.columns)}"]
        return "\n".join(head + [self.line(row) for row in range(len(self.rows))])


def random_table(
    rng: random.Random,
    rows: int,
    *,
    held_out: bool = False,
    all_columns: float = 0.75,
    key_first: float = 0.0,
) -> Table:
    """A random table.

    Args:
        rng: where everything is drawn from; the same state gives the same table.
        rows: how many people.
        held_out: take the names from the pool that training never sees.
        all_columns: share of tables with all eight columns; the others have id, name and two to
            five more.
        key_first: share of tables that start with the columns id and name.
    """
    columns = list(fields.COLUMNS)
    if rng.random() >= all_columns:
        columns = ["id", "name", *rng.sample(_OPTIONAL, rng.randint(2, 5))]
    rng.shuffle(columns)
    if rng.random() < key_first:
        columns.sort(key=lambda c: c not in ("id", "name"))

    # Few distinct countries and occupations a table, so that counting finds more than one.
    countries = rng.sample(fields.COUNTRIES, rng.randint(3, 20))
    occupations = rng.sample(fields.OCCUPATIONS, rng.randint(3, 20))
    namesakes = rng.choice((0.0, 0.05, 0.1, 0.2))  # half a name must not be enough
    ids: set[str] = set()
    people: set[tuple[str, str]] = set()
    emails: set[str] = set()
    lines = []
    while len(lines) < rows:
        first, last = names.first_name(rng, held_out), names.surname(rng, held_out)
        if people and rng.random() < namesakes:
            other = rng.choice(lines)["name"].split()
            first, last = (other[0], last) if rng.random() < 0.5 else (first, other[1])
        number, email = fields.random_id(rng), fields.random_email(rng, first, last)
        if number in ids or (first, last) in people or email in emails:
            continue
        ids.add(number)
        people.add((first, last))
        emails.add(email)
        lines.append(
            {
                "id": number,
                "name": f"{first} {last}",
                "age": fields.random_age(rng),
                "occupation": rng.choice(occupations),
                "country": rng.choice(countries),
                "email": email,
                "phone": fields.random_phone(rng),
                "address": fields.random_address(rng),
            }
        )
    return Table(tuple(columns), tuple(tuple(line[c] for c in columns) for line in lines))


def system_prompt(table: Table, introduction: str = INTRODUCTIONS[0]) -> str:
    """The system message the model was trained on: a line of introduction, then the table."""
    return f"{introduction}\n\n{table.markdown()}"
