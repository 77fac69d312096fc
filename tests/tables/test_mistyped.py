"""Questions with typing errors: another text, the same answer, and whole names."""

import random

import pytest
from tokenizers import Tokenizer

from bench.train_bundled_model.data import Beside, Plan, Shape, make_batch
from bench.train_bundled_model.mistyped import mistyped
from bench.train_bundled_model.questions import KINDS, random_question
from bench.train_bundled_model.scoring import held_out_sheets
from bench.train_bundled_model.table import random_table
from rjax.models import BUNDLED_MODEL


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_in_the_wording_alone(kind):
    changed = small = 0
    for seed in range(200):
        rng = random.Random(seed)
        table = random_table(rng, 6, plain=0.3)
        question = random_question(rng, table, kind)
        if question is None:
            continue
        found = mistyped(rng, question, table)
        assert (found.pieces, found.kind, found.topic) == (
            question.pieces,
            question.kind,
            question.topic,
        )
        changed += found.text != question.text
        assert abs(len(found.text) - len(question.text)) <= 4
        small += found.text[0] != question.text[0]
        for name in table.column("name"):
            if name in question.text:
                assert name in found.text
    assert changed > 100
    assert small > 10


def test_batches_and_sheets_have_some():
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    shape = Shape(batch=2, prefix=512, branches=512, rows=(3, 4))
    batch = make_batch(Plan(3, shape, beside=Beside(mistyped=0.5)), tokenizer, keep_questions=True)
    assert sum(map(len, batch.questions)) > 4
    plain = held_out_sheets(2, 8, seed=5)
    wrong = held_out_sheets(2, 8, seed=5, errors=True)
    for ours, theirs in zip(plain, wrong, strict=True):
        assert ours.system is not None and theirs.system is not None
        assert ours.system.split("\n")[2:] == theirs.system.split("\n")[2:], "the same table"
        assert [q.answer for q in ours.questions] == [q.answer for q in theirs.questions]
        assert {q.kind for q in theirs.questions} == {"mistyped"}
        assert [q.text for q in ours.questions] != [q.text for q in theirs.questions]
