"""Scores worked out by hand, prompts, files, and the sample by the bundled model."""

import json

import pytest

from bench.longbench import __main__ as longbench
from bench.longbench import make_sample, metrics
from bench.longbench.examples import Example, read_examples, shortened, split_prompt
from bench.longbench.tasks import TASKS, score, task_of
from tests.bundled import BUNDLED_SIZES


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "want"),
    [
        (metrics.exact_match, "The Cat!", "cat", 1.0),
        (metrics.exact_match, "cats", "cat", 0.0),
        (metrics.token_f1, "the cat sat on a mat", "cat mat", 2 * 2 / (4 + 2)),
        (metrics.token_f1, "cat cat", "cat", 2 / 3),
        (metrics.token_f1, "", "cat", 0.0),
        (metrics.token_f1, "dog", "cat", 0.0),
        (metrics.rouge_l, "police killed the gunman", "police kill the gunman", 0.75),
        (metrics.rouge_l, "the gunman police killed", "police killed the gunman", 0.5),
        (metrics.rouge_l, "a b c d e", "a c e", 2 * 3 / (5 + 3)),
        (metrics.rouge_l, "", "x", 0.0),
        (metrics.number_match, "Paragraph 7", "Paragraph 7", 1.0),
        (metrics.number_match, "7 or 8", "7", 0.5),
        (metrics.number_match, "none", "7", 0.0),
        (metrics.code_similarity, "# note\nreturn x\nreturn y", "return x", 1.0),
        (metrics.code_similarity, "", "x", 0.0),
    ],
)
def test_metrics_give_what_their_definitions_do(metric, prediction, answer, want):
    assert metric(prediction, answer) == pytest.approx(want)


def test_a_class_counts_once_and_not_for_its_parts():
    classes = ["Number", "Telephone number", "Date"]
    assert metrics.class_match("Telephone number", "Telephone number", ["number", *classes]) == 1
    assert metrics.class_match("Number or Date", "Date", classes) == 0.5
    assert metrics.class_match("none of them", "Date", classes) == 0


def test_every_task_makes_a_prompt_and_a_score():
    example = Example("CONTEXT {input}", "INPUT", ["Paragraph 3"], ["Paragraph 3", "Date"])
    for task in TASKS.values():
        shared, question = split_prompt(task, example)
        assert "CONTEXT {input}" in shared  # braces in a document are only text
        assert ("INPUT" in question) == ("{input}" in task.question)
        assert score(task, "Paragraph 3", example.answers, None)["score"] == pytest.approx(1)
    assert task_of("qasper_e") is TASKS["qasper"]
    with pytest.raises(ValueError, match="no template for the data set 'dureader'"):
        task_of("dureader")


def test_only_the_first_line_counts_where_the_task_says_so():
    assert score(TASKS["triviaqa"], "Paris\nQuestion: next", ["Paris"], None)["score"] == 1
    assert score(TASKS["hotpotqa"], "Paris\nQuestion: next", ["Paris"], None)["score"] < 1


def test_a_long_document_loses_its_middle():
    def encode(text):
        return [ord(c) for c in text]

    def decode(ids):
        return "".join(chr(i) for i in ids)

    assert shortened("abcdefghij", 10, encode, decode) == "abcdefghij"
    assert shortened("abcdefghij", 5, encode, decode) == "abhij"


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "qasper.jsonl"
    path.write_text('{"context": "c", "answers": ["a"]}\n{"context": "c", "answers": []}\n')
    with pytest.raises(ValueError, match=r"qasper.jsonl, line 2"):
        read_examples(path, None)
    assert read_examples(path, 1) == [Example("c", "", ["a"], None)]


def test_the_sample_is_what_its_maker_writes():
    kept = (longbench.SAMPLE / "table_qa.jsonl").read_text(encoding="utf-8")
    assert kept == "\n".join(make_sample.sample_lines()) + "\n"


@pytest.mark.usefixtures("optimised", "kept")
@pytest.mark.slow
def test_the_bundled_model_answers_the_sample_with_relay_on_and_off(tmp_path):
    longbench.main(
        [
            "--quiet",
            "--limit=3",
            "--relay=on,off",
            *(f"--{name.replace('_', '-')}={size}" for name, size in BUNDLED_SIZES.items()),
            f"--json={tmp_path / 'found.json'}",
            f"--predictions={tmp_path}",
        ]
    )
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["relay"] for row in rows] == ["on", "off"]
    assert rows[1]["same"]
    assert rows[0]["exact"] == rows[1]["exact"] >= 50
    assert rows[0]["shared_tokens"] > 0
    assert len((tmp_path / "table_qa-off.jsonl").read_text().splitlines()) == 3
