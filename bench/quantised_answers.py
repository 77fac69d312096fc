"""Answers and perplexity of the bundled model, quantised by `rjax quantize` in each scheme.

    python -m bench.quantised_answers
    python -m bench.quantised_answers --tables 128 --json bench/results/quantised_answers.json

The tables, questions and answers are those of `bench.table_answers`. Answers are not generated but
scored: an answer counts when each of its tokens, the end included, is the most likely one, so that
greedy decoding gives it. AWQ searches its scales on tables of training, never on the ones asked
about. Activations are in the engine's dtype for all schemes.
"""

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.command_line import command_parser, keep, run, save_part
from bench.train_bundled_model.scoring import EVALUATION_SEED, Sheet, held_out_sheets
from bench.train_bundled_model.tokenizer import answer_text, prefix_text, question_text
from rjax import LLM
from rjax.api.scoring import ScoreOutput
from rjax.benchmarks.records import record
from rjax.cli.values import some_of, whole
from rjax.models import BUNDLED_MODEL, config_from_folder
from rjax.models.quantising import SCHEMES, choose_settings, quantise_checkpoint

COLUMNS = {
    "weights": "weights",
    "right": "exact answers",
    "asked": "questions",
    "accuracy_percent": "exact, %",
    "points": "points from unquantised",
    "table_perplexity": "perplexity of tables",
    "answer_loss": "loss of answers, nat/token",
    "tensor_mb": "tensors, MB",
    "worst_module": "largest error",
    "worst_error": "relative error",
}
_CALIBRATION_SEED = 30_000_001  # neither of training nor of evaluation
_UNQUANTISED = "unquantised"


def calibration_prompts(count: int) -> list[list[int]]:
    """Token ids of chats about tables with the words of training."""
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    sheets = held_out_sheets(count, 1, rows=(5, 25), seed=_CALIBRATION_SEED, which="training")
    texts = [
        prefix_text(sheet.system) + question_text(question.text) + answer_text(question.answer)
        for sheet in sheets
        for question in sheet.questions
    ]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def measure(model: Path, sheets: Sequence[Sheet]) -> dict[str, Any]:
    """The exact answers of a model folder, and its perplexities."""
    llm = LLM(str(model), dequantize="off", enable_relay_attention="auto")
    tables: list[ScoreOutput] = []
    answers: list[ScoreOutput] = []
    start = prefix_text("").removesuffix("<|end|>")
    for sheet in sheets:
        prefix = prefix_text(sheet.system)
        tables += llm.score(start, prefix.removeprefix(start), use_tqdm=False)
        answers += llm.score(
            [prefix + question_text(question.text) for question in sheet.questions],
            [answer_text(question.answer) for question in sheet.questions],
            use_tqdm=False,
        )
    right = sum(answer.is_greedy for answer in answers)
    found = {
        "right": right,
        "asked": len(answers),
        "accuracy_percent": 100 * right / len(answers),
        "table_perplexity": _perplexity(tables),
        "answer_perplexity": _perplexity(answers),
        "answer_loss": math.log(_perplexity(answers)),
        "activations": llm.engine.summary["dtype"],
    }
    llm.close()
    return found


def _perplexity(scores: Sequence[ScoreOutput]) -> float:
    count = sum(len(score.token_ids) for score in scores)
    return math.exp(-sum(score.logprob for score in scores) / count)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each scheme, after that of the unquantised model."""
    sheets = held_out_sheets(
        options.tables,
        options.questions,
        rows=(options.rows, options.rows),
        seed=options.seed,
        which=options.values,
    )
    prompts = calibration_prompts(options.calibration)
    before: float | None = None
    for scheme in (_UNQUANTISED, *options.schemes):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            row: dict[str, Any] = {"weights": scheme}
            if scheme == _UNQUANTISED:
                model = BUNDLED_MODEL
                row["weights"] = config_from_folder(model).dtype
                row["tensor_mb"] = (
                    sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e6
                )
            else:
                model = Path(folder) / scheme
                settings = choose_settings(config_from_folder(BUNDLED_MODEL), scheme)
                written = quantise_checkpoint(
                    BUNDLED_MODEL, model, settings, prompts=prompts, progress=False
                )
                (worst,) = written.worst(1)
                row |= {
                    "tensor_mb": written.bytes_after / 1e6,
                    "group_size": settings.group_size,
                    "symmetric": settings.symmetric,
                    "worst_module": worst.module,
                    "worst_error": worst.relative_error,
                    "error_of": "outputs" if settings.calibrated else "weights",
                    "calibration_tokens": written.prompt_tokens,
                }
            row |= measure(model, sheets)
        gc.collect()
        before = row["accuracy_percent"] if before is None else before
        row["points"] = row["accuracy_percent"] - before
        row["seconds"] = time.monotonic() - began
        yield row


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.quantised_answers", __doc__)
    p.add_argument("--schemes", type=some_of(*SCHEMES), default=SCHEMES, help="comma-separated")
    p.add_argument("--tables", type=whole(1), default=16)
    p.add_argument("--questions", type=whole(1), default=16, help="questions about each table")
    p.add_argument("--rows", type=whole(1), default=30, help="of each table")
    p.add_argument("--values", choices=("real", "held_out"), default="real")
    p.add_argument("--seed", type=whole(0), default=EVALUATION_SEED)
    p.add_argument("--calibration", type=whole(1), default=16, help="prompts for awq")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure and report."""
    options = parser().parse_args(arguments)
    name = "quantised_answers"
    found: list[dict[str, Any]] = []
    for row in rows(options):
        found.append(row)
        save_part(record(f"bench.{name}", found, vars(options)), options.json, name)
        if not options.quiet:
            print(f"{row['weights']}: {row['right']} of {row['asked']} in {row['seconds']:.0f} s")
    keep(record(f"bench.{name}", found, vars(options)), COLUMNS, options.json, name)


if __name__ == "__main__":
    run("bench.quantised_answers", main)
