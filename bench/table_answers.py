"""Exact-answer scores of the bundled model (or another) on tables of values it never saw.

    python -m bench.table_answers                      # through the engine, 16 tables of real names
    python -m bench.table_answers --values held_out    # names and values as training's, but unseen
    python -m bench.table_answers --backend plain     # a plain decoding loop, no engine
    python -m bench.table_answers --tables 128 --json bench/results/table_answers.json

An answer counts when it equals the canonical one character for character; decoding is greedy.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from bench.command_line import run
from bench.train_bundled_model.decode import answer_questions
from bench.train_bundled_model.scoring import (
    EVALUATION_SEED,
    Score,
    Sheet,
    held_out_sheets,
    is_right,
    score,
    score_by_rows,
    summary,
    tableless_sheets,
)
from rjax.benchmarks.records import command
from rjax.cli.parser import OneLineParser
from rjax.cli.values import whole
from rjax.models import BUNDLED_MODEL, load_model

MAX_NEW_TOKENS = 256
ChatBackend = Callable[[Sequence[Sheet]], list[list[str]]]


def engine_answerer(model: Path, relay: str) -> ChatBackend:
    """Answers by rjax: every question is a chat whose system message is its table."""
    from rjax import LLM, SamplingParams

    llm = LLM(str(model), enable_relay_attention=relay)  # pyright: ignore[reportArgumentType]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)

    def answer(sheets: Sequence[Sheet]) -> list[list[str]]:
        chats = [
            [
                *([] if sheet.system is None else [{"role": "system", "content": sheet.system}]),
                {"role": "user", "content": question.text},
            ]
            for sheet in sheets
            for question in sheet.questions
        ]
        texts = iter([output.outputs[0].text for output in llm.chat(chats, params)])
        return [[next(texts) for _ in sheet.questions] for sheet in sheets]

    return answer


def plain_answerer(model: Path, group: int) -> ChatBackend:
    """Answers by a loop over the model itself, for ``group`` tables at a time."""
    loaded = load_model(model, dtype=None if on_gpu() else jnp.float32, progress=False)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def answer(sheets: Sequence[Sheet]) -> list[list[str]]:
        answers = []
        for at in range(0, len(sheets), group):
            part = sheets[at : at + group]
            answers += answer_questions(
                loaded.model,
                tokenizer,
                [sheet.system for sheet in part],
                [[question.text for question in sheet.questions] for sheet in part],
                max_new_tokens=MAX_NEW_TOKENS,
                implementation="cudnn" if on_gpu() else "xla",
                prefix_length=3584,
                question_length=128,
            )
        return answers

    return answer


def on_gpu() -> bool:
    """Whether JAX computes on a GPU here."""
    return jax.default_backend() == "gpu"


def measure(sheets: Sequence[Sheet], answer: ChatBackend, show_wrong: int) -> dict[str, Score]:
    """Ask everything and score it by kind, by kind and topic, and by table size."""
    answers = answer(sheets)
    right = [
        [is_right(question, text) for question, text in zip(sheet.questions, texts, strict=True)]
        for sheet, texts in zip(sheets, answers, strict=True)
    ]
    asked = [question for sheet in sheets for question in sheet.questions]
    marks = [mark for row in right for mark in row]
    texts = [text for row in answers for text in row]
    wrong = [(q, t) for q, t, mark in zip(asked, texts, marks, strict=True) if not mark]
    for question, text in wrong[:show_wrong]:
        print(f"{question.text}\n  right: {question.answer}\n  given: {text}")
    return score(zip(asked, marks, strict=True)) | score_by_rows(sheets, right)


def report(scores: dict[str, Score], seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """The scores with everything needed to repeat them."""
    return {
        "command": command("bench.table_answers"),
        "backend": args.backend,
        "model": args.model.name if args.model != BUNDLED_MODEL else "bundled",
        "values": args.values,
        "seed": args.seed,
        "tables": args.tables,
        "tableless": args.tableless,
        "mistyped": args.mistyped,
        "plain": args.plain,
        "questions_per_table": args.questions,
        "rows": args.rows,
        "seconds": round(seconds, 1),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "flax", "tokenizers")},
        "scores": {name: one.as_json() for name, one in scores.items()},
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneLineParser(
        prog="python -m bench.table_answers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", type=Path, default=BUNDLED_MODEL, help="model folder")
    p.add_argument("--backend", choices=("engine", "plain"), default="engine")
    p.add_argument("--relay", choices=("auto", "on", "off"), default="auto", help="engine only")
    p.add_argument("--tables", type=whole(1), default=16)
    p.add_argument("--questions", type=whole(1), default=16, help="questions about each table")
    p.add_argument(
        "--tableless",
        type=whole(0),
        default=8,
        help="chats without a table, or with a table about which nothing is asked",
    )
    p.add_argument(
        "--mistyped",
        type=whole(0),
        default=4,
        help="further tables, with typing errors in questions",
    )
    p.add_argument(
        "--plain",
        type=whole(0),
        default=4,
        help="further tables of 3 to 12 people, without ids or with first names only",
    )
    p.add_argument("--rows", type=whole(1), nargs=2, default=[5, 40], help="fewest and most rows")
    p.add_argument(
        "--values",
        choices=("real", "held_out"),
        default="real",
        help="real names and values, or generated ones; training saw neither",
    )
    p.add_argument("--seed", type=whole(0), default=EVALUATION_SEED)
    p.add_argument("--group", type=whole(1), default=8, help="tables at a time, plain backend only")
    p.add_argument("--show-wrong", type=whole(0), default=0, help="print so many wrong answers")
    p.add_argument("--json", type=Path, help="file for the scores")
    return p


def main() -> None:
    """Measure and report."""
    p = parser()
    args = p.parse_args()
    if args.rows[0] > args.rows[1]:
        p.error(f"--rows {args.rows[0]} {args.rows[1]}: give the fewest first")
    sheets = held_out_sheets(
        args.tables, args.questions, rows=tuple(args.rows), seed=args.seed, which=args.values
    )
    sheets += held_out_sheets(
        args.mistyped,
        args.questions,
        rows=tuple(args.rows),
        seed=args.seed + args.tables,
        which=args.values,
        errors=True,
    )
    sheets += held_out_sheets(
        args.plain,
        args.questions,
        rows=(3, 12),
        seed=args.seed + args.tables + args.mistyped,
        which=args.values,
        plain=True,
    )
    sheets += tableless_sheets(args.tableless, args.questions, seed=args.seed, which=args.values)
    answer = (
        engine_answerer(args.model, args.relay)
        if args.backend == "engine"
        else plain_answerer(args.model, args.group)
    )
    began = time.monotonic()
    scores = measure(sheets, answer, args.show_wrong)
    seconds = time.monotonic() - began
    print(summary(scores))
    print(f"{sum(len(s.questions) for s in sheets)} questions in {seconds:.1f} s")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report(scores, seconds, args), indent=2) + "\n")


if __name__ == "__main__":
    run("bench.table_answers", main)
