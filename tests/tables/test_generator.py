"""Tables and questions: deterministic, consistent, and with names kept apart."""

import random
import re

import pytest

from bench.train_bundled_model import Question, Table, fields, random_questions, random_table
from bench.train_bundled_model.make_demo import demo, demo_table, main
from bench.train_bundled_model.names import first_name, random_mix, surname
from bench.train_bundled_model.questions import KINDS, MAX_LISTED, random_question
from bench.train_bundled_model.scoring import held_out_sheets, is_right, score, score_by_rows
from bench.train_bundled_model.strings import filled, random_pattern
from bench.train_bundled_model.table import lines_before_rows, system_prompt
from bench.train_bundled_model.words import is_held_out, pool, words
from rjax.models.tables.demo import DEMO_FILE, demo_questions, demo_system_prompt

LISTS = ("first_names", "surnames", "english", "countries", "occupations", "cities", "streets")


def drawn(seed: int, rows: int = 12, count: int = 60) -> tuple[Table, list[Question]]:
    rng = random.Random(seed)
    table = random_table(rng, rows)
    return table, random_questions(rng, table, count)


def test_the_same_seed_gives_the_same():
    assert drawn(4) == drawn(4)
    assert drawn(4) != drawn(5)


@pytest.mark.parametrize("name", LISTS)
def test_training_and_evaluation_share_no_word_of_a_list(name):
    training = set(pool(name, "training"))
    assert training < set(words(name))
    for which in ("held_out", "real"):
        kept = pool(name, which)
        assert len(kept) >= 10
        assert all(is_held_out(word) for word in kept)
        assert not training & set(kept)


@pytest.mark.parametrize("which", ["training", "held_out", "real"])
def test_every_part_of_a_name_is_of_its_pool(which):
    rng = random.Random(5)
    for _ in range(300):
        mix = random_mix(rng, which)
        plain = (*mix[:3], 0.0, *mix[4:])  # joined names hold particles and initials too
        for part in (first_name(rng, plain, which), surname(rng, plain, which)):
            assert is_held_out(part) == (which != "training"), part


@pytest.mark.parametrize("which", ["training", "held_out", "real"])
def test_cells_are_well_formed_and_keys_unique(which):
    seen: set[str] = set()
    for seed in range(40):
        table = random_table(random.Random(seed), 40, which=which)
        assert {"id", "name"} <= set(table.columns)
        assert set(table.columns) <= {*fields.COLUMNS, *fields.EXTRA_COLUMNS}
        assert len(table.columns) <= 8
        seen |= set(table.columns)
        for row in table.rows:
            for cell in row:
                assert cell
                assert cell == cell.strip()
                assert not re.search(r"[|\n]", cell)
        for column in {"id", "name", "email"} & set(table.columns):
            assert len(set(table.column(column))) == 40
        for age in table.column("age") if "age" in table.columns else ():
            assert 0 <= int(age) <= 105
    assert seen == {*fields.COLUMNS, *fields.EXTRA_COLUMNS}


def test_tables_of_real_values_use_plain_formats():
    patterns = {
        "id": r"[1-9]\d{3}",
        "age": r"\d\d",
        "email": r"[a-z0-9.@_-]+",
        "phone": r"\+\d{1,2} \d{3} \d{4}",
        "address": r"\d{1,4} [A-Z]\w+ [A-Z]\w+",
    }
    for seed in range(20):
        table = random_table(random.Random(seed), 30, which="real")
        for column in patterns.keys() & set(table.columns):
            for cell in table.column(column):
                assert re.fullmatch(patterns[column], cell), column


def test_patterns_are_filled_as_they_say():
    rng = random.Random(2)
    assert re.fullmatch(r"[A-Z]-\d\d[a-z][0-9a-f]\w", filled(rng, "^-##@%*"))
    for _ in range(100):
        pattern = random_pattern(rng)
        assert len(filled(rng, pattern)) == len(pattern)


def test_markdown_reads_back_as_the_table():
    table, _ = drawn(1)
    lines = system_prompt(table, "Intro.\nMore.").split("\n")
    assert lines[:3] == ["Intro.", "More.", ""]
    parsed = [tuple(line.strip("| ").split(" | ")) for line in lines[3:]]
    assert lines[lines_before_rows("Intro.\nMore.")] == table.line(0)
    assert (parsed[0], tuple(parsed[2:])) == (table.columns, table.rows)
    assert set(parsed[1]) == {"---"}


TITLES = {
    "country": r"From (.+?):",
    "occupation": r"Working as (.+?):",
    "city": r"In the city (.+?):",
    "department": r"In the department (.+?):",
}


def listed(table: Table, question: Question) -> str:
    """The answer to a count, found from question and table by other means than the generator's."""
    if question.topic == "people":
        return f"The table has {len(table.rows)} people."
    rows = people(table)
    if question.topic == "age":
        word, limit = re.match(r"(Older|Younger) than (-?\d+):", question.answer).groups()  # pyright: ignore
        assert limit in question.text
        sign = 1 if word == "Older" else -1
        found = [n for n, r in rows if sign * int(r["age"]) > sign * int(limit)]
        title = f"{word} than {limit}"
    else:
        match = re.match(TITLES[question.topic], question.answer)
        assert match is not None
        assert match[1] in question.text
        found = [n for n, r in rows if r[question.topic] == match[1]]
        title = match[0].removesuffix(":")
    assert len(found) <= MAX_LISTED
    numbered = ", ".join(f"{at}. {name}" for at, name in enumerate(found, 1))
    return f"{title}: {numbered + '.' if found else 'none.'} Total: {len(found)}."


def named(table: Table, text: str) -> list[str]:
    """The names in a text, in its order, without names that are part of another one."""
    found = [name for name in table.column("name") if name in text]
    whole = [n for n in found if not any(n != other and n in other for other in found)]
    return sorted(whole, key=text.index)


def answered_anew(table: Table, question: Question) -> str:
    """The answer found from question and table by other means than the generator's."""
    answer = question.answer
    rows = dict(people(table))
    if question.kind == "count":
        return listed(table, question)
    if question.kind == "row":
        (name,) = named(table, question.text)
        return f"Here is the row:\n| {' | '.join(rows[name].values())} |"
    if question.kind in ("cell", "lookup"):
        column, key = re.match(r"The (\w+) of (.+?) is ", answer).groups()  # pyright: ignore
        by = "id" if question.kind == "lookup" and key.startswith("id ") else "name"
        by = "email" if "@" in key else by
        key = key.removeprefix("id ") if by == "id" else key
        assert key in question.text
        (row,) = [r for r in rows.values() if r[by] == key]
        return f"The {column} of {'id ' if by == 'id' else ''}{key} is {row[column]}."
    ages = {n: int(r["age"]) for n, r in rows.items()} if "age" in table.columns else {}
    if question.topic in ("oldest", "youngest"):
        most, how = (max, "highest") if question.topic == "oldest" else (min, "lowest")
        name = most(ages, key=lambda n: ages[n])
        return f"The {how} age is {ages[name]}, so the {question.topic} person is {name}."
    a, b = named(table, question.text)
    if question.topic == "country":
        x, y = rows[a]["country"], rows[b]["country"]
        return f"{a} lives in {x} and {b} lives in {y}, so {'yes' if x == y else 'no'}."
    word = "younger" if "younger" in question.text else "older"
    first = a if (ages[a] > ages[b]) == (word == "older") else b
    end = "both are the same age" if ages[a] == ages[b] else f"{first} is {word}"
    return f"{a} is {ages[a]} and {b} is {ages[b]}, so {end}."


def people(table: Table) -> list[tuple[str, dict[str, str]]]:
    """Each name with its row by column."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return list(zip(table.column("name"), rows, strict=True))


@pytest.mark.parametrize("which", ["training", "real"])
@pytest.mark.parametrize("seed", range(8))
def test_answers_follow_from_the_table(seed, which):
    table = random_table(random.Random(seed), 5 + 4 * seed, which=which, plain=seed % 2 / 2)
    for question in random_questions(random.Random(seed), table, 80, (1.0, 1.0, 3.0, 2.0, 1.0)):
        assert question.answer == answered_anew(table, question), question


@pytest.mark.parametrize("seed", range(4))
def test_each_piece_of_an_answer_is_of_its_row(seed):
    table = random_table(random.Random(seed), 20)
    for question in random_questions(random.Random(seed), table, 60):
        for piece in question.pieces:
            if piece.row is None or piece.text.endswith(":"):
                continue
            assert any(cell in piece.text for cell in table.rows[piece.row]), question


def test_plain_tables():
    tables = [random_table(random.Random(seed), 8, plain=0.5) for seed in range(60)]
    without_ids = [t for t in tables if "id" not in t.columns]
    first_only = [t for t in tables if sum(" " not in name for name in t.column("name")) > 4]
    assert 15 < len(without_ids) < 45 and 15 < len(first_only) < 45
    assert all(len(set(t.column("name"))) == 8 for t in tables)
    assert {id(t) for t in without_ids} & {id(t) for t in first_only}
    for sheet in held_out_sheets(4, 8, rows=(3, 5), seed=5, plain=True):
        assert {q.kind for q in sheet.questions} == {"plain"} and 3 <= sheet.rows <= 5


def test_every_kind_and_column_is_asked():
    _, questions = drawn(3, count=400)
    assert {q.kind for q in questions} == set(KINDS)
    columns = {*fields.COLUMNS, *fields.EXTRA_COLUMNS}
    assert {q.topic for q in questions if q.kind == "cell"} <= columns
    with pytest.raises(ValueError, match="kind is 'cells'"):
        random_question(random.Random(0), drawn(0)[0], "cells")


def test_the_demo_fits_its_table():
    table = demo_table()
    assert len(table.rows) == 24
    assert table.markdown() in demo_system_prompt()
    questions = demo_questions()
    assert len({text for text, _ in questions}) == 16
    for text, answer in questions:
        assert any(c in text or c in answer for row in table.rows for c in row) or "people" in text
        assert answer[-1] in ".|"


def test_the_demo_file_is_what_the_generator_makes(tmp_path):
    main(tmp_path / "demo.json")
    assert (tmp_path / "demo.json").read_bytes() == DEMO_FILE.read_bytes()
    assert demo() == {
        "system_prompt": demo_system_prompt(),
        "questions": [list(pair) for pair in demo_questions()],
    }


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
