"""Tables and questions: deterministic, consistent, and with names kept apart."""

import random
import re

import pytest

from models.tables import Question, Table, fields, names, random_questions, random_table
from models.tables.demo import demo_questions, demo_system_prompt, demo_table
from models.tables.questions import KINDS, MAX_LISTED, random_question
from models.tables.scoring import held_out_sheets, is_right, score, score_by_rows
from models.tables.table import system_prompt


def drawn(seed: int, rows: int = 12, count: int = 60) -> tuple[Table, list[Question]]:
    rng = random.Random(seed)
    table = random_table(rng, rows)
    return table, random_questions(rng, table, count)


def test_the_same_seed_gives_the_same():
    assert drawn(4) == drawn(4)
    assert drawn(4) != drawn(5)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_name_is_of_its_pool(held_out):
    for seed in range(20):
        table = random_table(random.Random(seed), 20, held_out=held_out)
        for name in table.column("name"):
            assert [names.is_held_out(part) for part in name.split()] == [held_out, held_out]


def test_cells_are_well_formed_and_keys_unique():
    patterns = {
        "id": r"[1-9]\d{3}",
        "name": r"[A-Z]\w+ [A-Z]\w+",
        "age": r"\d\d",
        "occupation": r"[a-z]+",
        "country": r"[A-Z][A-Za-z ]+",
        "email": r"[a-z0-9.]+@[a-z]+\.[a-z]+",
        "phone": r"\+\d{1,2} \d{3} \d{4}",
        "address": r"\d{1,3} [A-Z]\w+ [A-Z]\w+",
    }
    for seed in range(30):
        table = random_table(random.Random(seed), 40)
        assert {"id", "name"} <= set(table.columns) <= set(fields.COLUMNS)
        for row in range(40):
            for column in table.columns:
                assert re.fullmatch(patterns[column], table.cell(row, column)), column
        for column in {"id", "name", "email"} & set(table.columns):
            assert len(set(table.column(column))) == 40


def test_markdown_reads_back_as_the_table():
    table, _ = drawn(1)
    lines = system_prompt(table, "Intro.").split("\n")
    assert lines[:2] == ["Intro.", ""]
    parsed = [tuple(line.strip("| ").split(" | ")) for line in lines[2:]]
    assert (parsed[0], tuple(parsed[2:])) == (table.columns, table.rows)
    assert set(parsed[1]) == {"---"}


def answered_anew(table: Table, question: Question) -> str:
    """The answer found from question and table by other means than the generator's."""
    answer = question.answer
    found = [name for name in table.column("name") if name in answer]
    rows = {name: dict(zip(table.columns, row, strict=True)) for name, row in people(table)}
    if question.kind == "row":
        (name,) = [n for n in rows if n in question.text]
        return f"Here is the row:\n| {' | '.join(rows[name].values())} |"
    if question.kind in ("cell", "lookup"):
        column, key = re.match(r"The (\w+) of (.+) is ", answer).groups()  # pyright: ignore
        assert key.removeprefix("id ") in question.text
        (row,) = [r for r in rows.values() if key.removeprefix("id ") in r.values()]
        return f"The {column} of {key} is {row[column]}."
    if question.topic == "people":
        return f"The table has {len(table.rows)} people."
    if question.kind == "count":
        if question.topic == "age":
            limit = int(re.search(r"\d+", question.text)[0])  # pyright: ignore
            found = [n for n, r in rows.items() if int(r["age"]) > limit]
        else:
            value = re.match(r"(?:From|Working as) ([^:]+):", answer)[1]  # pyright: ignore
            assert value in question.text
            found = [n for n, r in rows.items() if r[question.topic] == value]
        assert len(found) <= MAX_LISTED
        return f"{answer.split(':')[0]}: {', '.join(found) or 'none'}. Total: {len(found)}."
    ages = {n: int(r["age"]) for n, r in rows.items()} if "age" in table.columns else {}
    if question.topic in ("oldest", "youngest"):
        name = (max if question.topic == "oldest" else min)(ages, key=lambda n: ages[n])
        return f"The {question.topic} person is {name}, aged {ages[name]}."
    a, b = sorted((n for n in rows if n in question.text), key=question.text.index)
    if question.topic == "country":
        x, y = rows[a]["country"], rows[b]["country"]
        return f"{a} lives in {x} and {b} lives in {y}, so {'yes' if x == y else 'no'}."
    word = "younger" if "younger" in question.text else "older"
    first = a if (ages[a] > ages[b]) == (word == "older") else b
    end = "both are the same age" if ages[a] == ages[b] else f"{first} is {word}"
    return f"{a} is {ages[a]} and {b} is {ages[b]}, so {end}."


def people(table: Table) -> list[tuple[str, tuple[str, ...]]]:
    return list(zip(table.column("name"), table.rows, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_answers_follow_from_the_table(seed):
    table, questions = drawn(seed, rows=5 + 3 * seed, count=80)
    for question in questions:
        assert question.answer == answered_anew(table, question), question


def test_every_kind_and_column_is_asked():
    _, questions = drawn(3, count=400)
    assert {q.kind for q in questions} == set(KINDS)
    assert {q.topic for q in questions if q.kind == "cell"} <= set(fields.COLUMNS)
    with pytest.raises(ValueError, match="kind is 'cells'"):
        random_question(random.Random(0), drawn(0)[0], "cells")


def test_the_demo_fits_its_table():
    table = demo_table()
    assert len(table.rows) == 30
    assert table.markdown() in demo_system_prompt()
    questions = demo_questions()
    assert len({text for text, _ in questions}) == 16
    for text, answer in questions:
        keys = [c for row in table.rows for c in row if c in text]
        assert keys or "people" in answer, text
        assert answer[-1] in ".|"


def test_scores():
    (sheet,) = held_out_sheets(1, 40)
    marks = [True] * 39 + [False]
    scores = score(zip(sheet.questions, marks, strict=True))
    assert sum(scores[k].asked for k in KINDS if k in scores) == 40
    assert sum(scores[k].right for k in KINDS if k in scores) == 39
    by_rows = score_by_rows([sheet], [marks])
    assert sum(s.asked for s in by_rows.values()) == scores["cell"].asked
    question = sheet.questions[0]
    assert is_right(question, question.answer + "\n")
    assert not is_right(question, question.answer[:-1])
