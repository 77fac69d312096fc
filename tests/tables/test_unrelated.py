"""Messages without an answer in a table: drawn, kept apart, and put into batches."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from bench.train_bundled_model.data import Beside, Plan, Shape, make_batch
from bench.train_bundled_model.scoring import is_right, score, tableless_sheets
from bench.train_bundled_model.tokenizer import BOS, END, answer_text, prefix_text, question_text
from bench.train_bundled_model.unrelated import (
    ANSWER,
    tableless_question,
    tableless_system,
    unrelated_question,
)
from rjax.models import BUNDLED_MODEL

TOKENIZER = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
SHAPE = Shape(batch=3, prefix=512, branches=512, rows=(3, 4))


def drawn(which, count: int = 4000) -> list[str]:
    rng = random.Random(1)
    return [unrelated_question(rng, which).text for _ in range(count)]


def test_messages_are_many_and_evaluation_has_its_own():
    training, held_out, real = (set(drawn(which)) for which in ("training", "held_out", "real"))
    assert len(training) > 1000
    assert {"Hello", "How are you?"} <= training
    assert not training & (held_out | real)
    assert {"Who are you?", "Why is the sky blue?"} <= held_out & real
    assert not any("{" in text for text in training | held_out), "every place is filled"


@pytest.mark.parametrize("which", ["training", "held_out", "real"])
def test_without_a_table_everything_has_one_answer(which):
    rng = random.Random(2)
    asked = [tableless_question(rng, which) for _ in range(400)]
    assert {question.answer for question in asked} == {ANSWER}
    assert {question.topic for question in asked} == {"message", "people"}
    systems = {tableless_system(rng, which) for _ in range(200)}
    assert None in systems
    assert len(systems) > 10
    assert not any("|" in (system or "") for system in systems)


def test_a_batch_without_tables():
    plan = Plan(6, SHAPE, beside=Beside(tableless=1.0, turns=0.4))
    batch = make_batch(plan, TOKENIZER, keep_questions=True)
    end = TOKENIZER.token_to_id(END)
    for b, asked in enumerate(batch.questions):
        assert len(asked) >= 3
        text = TOKENIZER.decode(batch.prefix[b, : batch.lengths[b]].tolist(), False)
        assert text.startswith(BOS)
        turns = 0
        for number, question in enumerate(asked, 1):
            mine = batch.segments[b] == number
            tokens = batch.tokens[b, mine]
            branch = TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False)
            assert branch.endswith(question_text(question.text) + answer_text(ANSWER))
            turns += branch.count(ANSWER) - 1
            taught = tokens[np.flatnonzero(batch.answers[b, mine]) + 1]
            assert TOKENIZER.decode(taught.tolist(), skip_special_tokens=False) == ANSWER + END
            assert taught[-1] == end
        assert turns > 0
    assert not batch.lines.any()
    assert (batch.first_lines >= SHAPE.prefix).all()


def test_a_batch_mixes_them():
    plan = Plan(8, SHAPE, beside=Beside(tableless=0.5, unrelated=0.3, turns=0.2))
    batch = make_batch(plan, TOKENIZER, keep_questions=True)
    with_table = [bool(first < SHAPE.prefix) for first in batch.first_lines]
    assert set(with_table) == {True, False}
    for has_table, asked in zip(with_table, batch.questions, strict=True):
        kinds = {question.kind for question in asked}
        assert ("unrelated" in kinds and len(kinds) > 1) if has_table else kinds == {"unrelated"}
    plain = make_batch(Plan(7, SHAPE), TOKENIZER, keep_questions=True)
    assert not any(q.kind == "unrelated" for asked in plain.questions for q in asked)


def test_turns_are_written_as_the_chat_template_writes_them():
    chat = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    turns = [("user", "Hello"), ("assistant", ANSWER), ("user", "Hi")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = question_text("Hello") + answer_text(ANSWER) + question_text("Hi")
    system = {"role": "system", "content": "Be brief."}
    for found, prefix in ((messages, None), ([system, *messages], "Be brief.")):
        written = chat.apply_chat_template(found, add_generation_prompt=True, tokenize=False)
        assert written == prefix_text(prefix) + text


def test_they_are_scored_as_a_kind_of_their_own():
    sheets = tableless_sheets(6, 10, which="held_out")
    assert sheets == tableless_sheets(6, 10, which="held_out")
    assert [sheet.rows > 0 for sheet in sheets] == [False, True] * 3
    asked = [question for sheet in sheets for question in sheet.questions]
    found = score((question, is_right(question, ANSWER)) for question in asked)
    assert found["unrelated"].right == len(asked) == 60
