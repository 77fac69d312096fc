"""The bundled tokenizer: nothing is lost, and a cell's tokens do not depend on its neighbours."""

import pytest
from transformers import AutoTokenizer

from bench.train_bundled_model.scoring import held_out_sheets
from bench.train_bundled_model.tokenizer import BOS, END, answer_text, prefix_text, question_text
from rjax.models import BUNDLED_MODEL


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def sheet():
    return held_out_sheets(1, 24, rows=(30, 30))[0]


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    "text", ["", "naïve café", "日本語 🙂", "a  b\n\n\tc |d| e", "A1_b2", " lead", "trail "]
)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_tables_and_questions_come_back(tokenizer, sheet):
    for text in [sheet.system, *(q.text for q in sheet.questions)]:
        assert tokenizer.decode(ids(tokenizer, text)) == text


def test_bos_comes_once_at_the_start(tokenizer):
    bos = tokenizer.convert_tokens_to_ids(BOS)
    assert tokenizer("hello").input_ids == [bos, *ids(tokenizer, "hello")]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, END)


def test_the_chat_template_is_what_training_uses(tokenizer, sheet):
    question = sheet.questions[0]
    chat = [
        {"role": "system", "content": sheet.system},
        {"role": "user", "content": question.text},
    ]
    head = prefix_text(sheet.system) + question_text(question.text)
    open_chat = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert open_chat == head
    chat.append({"role": "assistant", "content": question.answer})
    closed = tokenizer.apply_chat_template(chat, tokenize=False)
    assert closed == head + answer_text(question.answer)
    pieces = (prefix_text(sheet.system), question_text(question.text), answer_text(question.answer))
    tokens = [token for piece in pieces for token in ids(tokenizer, piece)]
    assert tokens == ids(tokenizer, closed)
    with pytest.raises(Exception, match="role must be"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_a_cell_has_the_same_tokens_everywhere(tokenizer, sheet):
    for line in sheet.system.splitlines()[4:]:
        tokens = ids(tokenizer, line)
        for cell in line.strip("| ").split(" | "):
            alone = ids(tokenizer, cell)
            assert any(tokens[i : i + len(alone)] == alone for i in range(len(tokens))), cell


def test_a_table_of_30_rows_has_1800_to_2500_tokens(tokenizer, sheet):
    assert 1800 <= len(ids(tokenizer, sheet.system)) <= 2500
