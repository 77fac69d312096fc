"""A Markdown table of people, drawn from a random generator."""

import dataclasses
import random

from bench.train_bundled_model import fields, names
from bench.train_bundled_model.words import Pool

INTRODUCTIONS = (
    "Answer questions about the people in this table.",
    "You answer questions about the table below.",
    "You are a helpful assistant. Use this table of people.",
    "You are a helpful assistant.",
    "Here is a table of people. Answer from it and from nothing else.",
    "This is the staff list.",
    "People:",
    "The following table lists people.\nAnswer each question with one short sentence.",
)
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


def _random_columns(rng: random.Random, all_columns: float, extra: float) -> list[str]:
    columns: list[str] = list(fields.COLUMNS)
    if rng.random() >= all_columns:
        columns = ["id", "name", *rng.sample(_OPTIONAL, rng.randint(2, 5))]
    if rng.random() < extra:
        columns += rng.sample(fields.EXTRA_COLUMNS, rng.randint(1, 2))
        if len(columns) > 8:
            dropped = rng.sample(_OPTIONAL, 2)
            columns = [c for c in columns if c not in dropped]
    rng.shuffle(columns)
    return columns


def random_table(
    rng: random.Random,
    rows: int,
    *,
    which: Pool = "training",
    all_columns: float = 0.75,
    extra: float = 0.25,
    key_first: float = 0.0,
    plain: float = 0.0,
) -> Table:
    """A random table.

    Args:
        rng: where everything is drawn from; the same state gives the same table.
        rows: how many people.
        which: pool that names and words come from.
        all_columns: share of tables with all eight columns; the others have id, name and two to
            five more.
        extra: share of tables that also have one or two of `fields.EXTRA_COLUMNS`, instead of
            others where there would be more than eight columns.
        key_first: share of tables that start with the columns id and name.
        plain: share of tables without ids, and of tables whose people have a first name only; a
            table may be both.
    """
    columns = _random_columns(rng, all_columns, extra)
    if plain and rng.random() < plain:
        columns.remove("id")
    first_only = plain > 0 and rng.random() < plain
    if rng.random() < key_first:
        columns.sort(key=lambda c: c not in ("id", "name"))

    formats = fields.random_formats(rng, which)
    mix = names.random_mix(rng, which)
    namesakes = rng.choice((0.0, 0.05, 0.1, 0.2))  # half a name must not be enough
    taken: set[tuple[str, str]] = set()  # cells that must be unique in their column
    people: list[tuple[str, str]] = []
    lines = []
    while len(lines) < rows:
        first, last = names.first_name(rng, mix, which), names.surname(rng, mix, which)
        if people and rng.random() < namesakes:
            other = rng.choice(people)
            first, last = (other[0], last) if rng.random() < 0.5 else (first, other[1])
        line = fields.random_row(rng, formats, len(lines), first, last)
        if first_only:
            line["name"] = first
        keys = {(column, line[column]) for column in ("id", "name", "email")}
        if keys & taken:
            continue
        taken |= keys
        people.append((first, last))
        lines.append(line)
    return Table(tuple(columns), tuple(tuple(line[c] for c in columns) for line in lines))


def lines_before_rows(introduction: str) -> int:
    """Lines of a system message before the first row: introduction, empty, column names, rule."""
    return introduction.count("\n") + 4 if introduction else 2


def system_prompt(table: Table, introduction: str = INTRODUCTIONS[0]) -> str:
    """The system message that the model was trained on: an introduction if any, then the table."""
    return f"{introduction}\n\n{table.markdown()}" if introduction else table.markdown()
