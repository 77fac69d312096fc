"""Answers and scores on LongBench-format files, with relay attention on and off.

    python -m bench.longbench                                   # the sample, the bundled model
    python -m bench.longbench --data FOLDER --model MODEL --chat --relay auto,off
    python -m bench.longbench --data FOLDER --tasks hotpotqa,qasper --limit 50

FOLDER holds one NAME.jsonl for each data set: lines with ``context``, ``input`` and ``answers``.
Questions about one document share its KV, so put them in one file. Decoding is greedy. Documents
that are too long for the model are truncated in the middle. Predictions are saved in --predictions.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.command_line import command_parser, keep, run
from bench.longbench.examples import Example, read_examples, shortened, split_prompt
from bench.longbench.tasks import Task, score, task_of
from rjax.benchmarks.engines import EngineSettings, model_name, running_llm
from rjax.benchmarks.records import record
from rjax.cli.values import whole
from rjax.commands.bench.options import add_engine_options, add_relay_modes, given_settings

SAMPLE: Path = Path(__file__).parent / "sample"
"""Folder of the sample."""

COLUMNS = {
    "task": "task",
    "relay": "relay",
    "examples": "examples",
    "metric": "metric",
    "score": "score",
    "f1": "F1",
    "rouge_l": "ROUGE-L",
    "exact": "exact",
    "shared_tokens": "tokens read from shared pages",
    "tokens_per_s": "output tokens/s",
    "same": "same as first mode",
}
_MARGIN = 64  # tokens for the chat template


def predict(
    llm: Any, task: Task, examples: list[Example], *, chat: bool, longest: int
) -> tuple[list[Any], float]:
    """Generate for all examples; return the outputs and the seconds."""
    from rjax import SamplingParams

    tokenizer = llm.engine.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode_batch([text])[0]

    prompts = []
    for example in examples:
        shared, question = split_prompt(task, example)
        room = longest - task.new_tokens - len(encode(question) if question else []) - _MARGIN
        prompts.append((shortened(shared, room, encode, tokenizer.decode), question))
    params = SamplingParams(temperature=0.0, max_tokens=task.new_tokens)
    start = time.perf_counter()
    if chat:
        messages = [
            [{"role": "system", "content": shared}, {"role": "user", "content": question}]
            for shared, question in prompts
        ]
        outputs = llm.chat(messages, params, use_tqdm=False)
    else:
        outputs = llm.generate([a + b for a, b in prompts], params, use_tqdm=False)
    return outputs, time.perf_counter() - start


def measure(
    options: argparse.Namespace, name: str, relay: str, examples: list[Example], llm: Any
) -> tuple[dict[str, Any], list[str]]:
    """One task in one mode: its row and its predictions."""
    task = task_of(name)
    llm.reset_prefix_cache()
    outputs, seconds = predict(
        llm, task, examples, chat=options.chat, longest=options.max_model_len
    )
    texts = [output.outputs[0].text for output in outputs]
    found = [
        score(task, text, example.answers, example.all_classes)
        for text, example in zip(texts, examples, strict=True)
    ]
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    means = {key: 100 * statistics.mean(row[key] for row in found) for key in found[0]}
    row = {
        "model": model_name(given_settings(EngineSettings, options)),
        "task": name,
        "relay": relay,
        "examples": len(examples),
        "metric": task.metric,
        **means,
        "shared_tokens": sum(output.num_cached_tokens for output in outputs),
        "tokens_per_s": written / seconds,
    }
    return row, texts


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.longbench", __doc__)
    add_engine_options(p)
    p.add_argument("--data", type=Path, default=SAMPLE, help="folder of NAME.jsonl files")
    p.add_argument("--tasks", help="names, comma-separated; default: every file of the folder")
    p.add_argument("--limit", type=whole(1), help="examples of each task")
    p.add_argument("--chat", action="store_true", help="document as system message, then question")
    add_relay_modes(p)
    p.add_argument(
        "--max-model-len", type=whole(1), default=4096, help="tokens of prompt and answer"
    )
    p.add_argument("--predictions", type=Path, help="folder for the predictions")
    return p


def main(arguments: list[str] | None = None) -> None:
    """Answer, score, print and save."""
    options = parser().parse_args(arguments)
    if options.model is None and options.shapes is None:
        options.chat = True  # the bundled model requires it
    names = options.tasks.split(",") if options.tasks else None
    files = sorted(options.data.glob("*.jsonl"))
    files = [path for path in files if names is None or path.stem in names]
    if not files:
        raise SystemExit(f"{options.data} holds no .jsonl file of these tasks")
    data = {path.stem: read_examples(path, options.limit) for path in files}
    rows, texts, backend = [], {}, ""
    for relay in options.relay:
        settings = given_settings(EngineSettings, options)
        with running_llm(settings, relay=relay, max_model_len=options.max_model_len) as llm:
            for name, examples in tqdm(data.items(), desc=relay, disable=options.quiet):
                row, predicted = measure(options, name, relay, examples, llm)
                first = texts.setdefault(name, predicted)
                rows.append(row | {"same": first == predicted})
                if options.predictions is not None:
                    _write_predictions(options.predictions / f"{name}-{relay}.jsonl", predicted)
            backend = llm.stats().backend
    found = record("bench.longbench", rows, vars(options), backend=backend)
    keep(found, COLUMNS, options.json, "longbench")


def _write_predictions(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"pred": text}, ensure_ascii=False) for text in texts)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run("bench.longbench", main)
