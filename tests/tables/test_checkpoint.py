"""The checkpoint in the repository: well formed, small, and able to answer."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from bench.train_bundled_model.decode import answer_questions
from bench.train_bundled_model.scoring import held_out_sheets, is_right
from rjax.models import BUNDLED_MODEL, LoadedModel, config_from_folder, load_model
from rjax.models.tables.demo import demo_questions, demo_system_prompt


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(BUNDLED_MODEL, dtype=jnp.float32, progress=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))


def test_it_keeps_within_its_limits(loaded):
    files = [file for file in BUNDLED_MODEL.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40 * 2**20
    assert max(file.stat().st_size for file in files) < 16 * 2**20
    sizes = [leaf.size for _, leaf in nnx.to_flat_state(nnx.state(loaded.model))]
    assert sum(sizes) <= 20_000_000


def test_its_files_agree_on_the_special_tokens(tokenizer):
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    generation = json.loads((BUNDLED_MODEL / "generation_config.json").read_text())
    names = json.loads((BUNDLED_MODEL / "tokenizer_config.json").read_text())
    for kind in ("bos", "eos", "pad"):
        number = tokenizer.token_to_id(names[f"{kind}_token"])
        assert config[f"{kind}_token_id"] == generation[f"{kind}_token_id"] == number
    assert config_from_folder(BUNDLED_MODEL).vocab_size == tokenizer.get_vocab_size()


@pytest.mark.slow  # tests/engine/test_bundled_model.py asks it by default
def test_it_answers_about_a_small_held_out_table(loaded, tokenizer):
    sheets = held_out_sheets(1, 4, rows=(5, 5), weights=(1.0, 0.0, 0.0, 0.0, 0.0))
    answers = answer_questions(
        loaded.model,
        tokenizer,
        [sheet.system for sheet in sheets],
        [[question.text for question in sheet.questions] for sheet in sheets],
        max_new_tokens=48,
    )
    wrong = [
        (question.text, answer)
        for sheet, given in zip(sheets, answers, strict=True)
        for question, answer in zip(sheet.questions, given, strict=True)
        if not is_right(question, answer)
    ]
    assert len(wrong) <= 1, wrong


@pytest.mark.slow
def test_it_answers_the_demo(loaded, tokenizer):
    texts, expected = zip(*demo_questions(), strict=True)
    (answers,) = answer_questions(loaded.model, tokenizer, [demo_system_prompt()], [texts])
    right = np.array([a.strip() == e for a, e in zip(answers, expected, strict=True)])
    assert right.sum() >= len(right) - 1, [
        (t, a) for t, a, ok in zip(texts, answers, right, strict=True) if not ok
    ]
