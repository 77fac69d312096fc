"""The command ``rjax quantize``: write a quantised copy of a model."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rjax.cli.errors import parse_and_run
from rjax.cli.parser import OneLineParser
from rjax.cli.prompts import Task, tasks_of_file
from rjax.errors import InvalidConfigError, InvalidRequestError

if TYPE_CHECKING:
    from rjax.models.quantising import QuantisedCheckpoint
    from rjax.tokenization import Tokenizer

_NAME = "rjax quantize"
_SCHEMES = ("fp8", "int8", "int4", "awq", "mxfp4")
_GROUP_SIZES = (32, 64, 128)
_SHOWN_MODULES = 5

_EPILOG = """\
schemes:
  fp8    8-bit floats, a scale for each output channel, activations in fp8 by token (FP8_DYNAMIC)
  int8   8-bit integers, a scale for each output channel, activations in int8 by token (W8A8)
  int4   4-bit integers, a scale for each group of inputs (W4A16)
  awq    as int4 with zero points, and scales of the inputs that give the least error on your
         prompts (W4A16_ASYM, or W4A16 with --symmetric)
  mxfp4  experts alone, in 4-bit floats with a power of two for each 32 inputs; for gpt-oss
Embeddings and the output projection stay as they are. rjax quantises activations for fp8 on Hopper;
otherwise it keeps them in the model's dtype.

examples:
  rjax quantize Qwen/Qwen3-0.6B ./qwen3-fp8 --scheme fp8
      needs no prompts
  rjax quantize ./llama ./llama-awq --scheme awq --prompts ask.jsonl
      ask.jsonl holds {"prompt": "..."} or {"messages": [...]} on each line; or one text a line
  rjax serve ./llama-awq
      a quantised folder is a model as any other, in a format that vLLM and transformers read

exit status: 0 done, 2 bad input, 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=_NAME,
        usage="%(prog)s MODEL OUT --scheme SCHEME [options]",
        description="Write a model with quantised weights, in the format of compressed-tensors or, "
        "for mxfp4, in that of gpt-oss.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of the unquantised model")
    parser.add_argument("out", metavar="OUT", type=Path, help="new folder for the quantised model")
    parser.add_argument(
        "--scheme", choices=_SCHEMES, required=True, help="how weights are stored, see below"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=_GROUP_SIZES,
        help="inputs that share a scale, for int4 and awq (default: 128, or the largest that "
        "divides the inputs of all projections)",
    )
    parser.add_argument("--symmetric", action="store_true", help="no zero points, for awq")
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts as your users send them; awq needs them"
    )
    parser.add_argument(
        "--num-calibration-samples",
        type=_positive,
        default=128,
        metavar="N",
        help="use the first N prompts (default: 128)",
    )
    parser.add_argument(
        "--max-seq-length",
        type=_positive,
        default=2048,
        metavar="N",
        help="use the first N tokens of a prompt (default: 2048)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar on stderr")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(_NAME, build_parser(), argv, _quantise)


def _quantise(arguments: argparse.Namespace) -> int:
    tasks = _checked(arguments)
    from rjax.models import config_from_folder, resolve_folder
    from rjax.models.quantising import check_output, choose_settings, quantise_checkpoint

    check_output(arguments.out)
    folder = resolve_folder(arguments.model, arguments.revision, weights=False)
    settings = choose_settings(
        config_from_folder(folder), arguments.scheme, arguments.group_size, arguments.symmetric
    )
    folder = resolve_folder(arguments.model, arguments.revision)
    prompts = _encode(folder, tasks, arguments.max_seq_length) if tasks else []
    start = time.monotonic()
    found = quantise_checkpoint(
        folder, arguments.out, settings, prompts=prompts, progress=not arguments.no_progress
    )
    seconds = time.monotonic() - start
    record = _record(found, str(arguments.out), len(prompts), seconds)
    print(json.dumps(record) if arguments.json else "\n".join(_lines(found, record)))
    return 0


def _checked(arguments: argparse.Namespace) -> list[Task]:
    """The prompts to calibrate on; none for schemes that need none."""
    scheme = arguments.scheme
    grouped = scheme in ("int4", "awq")
    if arguments.group_size is not None and not grouped:
        raise InvalidConfigError(
            f"--group-size is for int4 and awq; {scheme} has no groups to choose"
        )
    if arguments.symmetric and scheme != "awq":
        raise InvalidConfigError(f"--symmetric is for awq; {scheme} is always symmetric")
    if scheme == "awq" and arguments.prompts is None:
        raise InvalidConfigError(
            "--scheme awq needs --prompts FILE: prompts as your users send them, one a line or as "
            "JSONL"
        )
    if arguments.prompts is None:
        return []
    if scheme != "awq":
        print(f"{_NAME}: --prompts has no effect: {scheme} needs none", file=sys.stderr)
        return []
    tasks = tasks_of_file(arguments.prompts, "--prompts")
    return tasks[: arguments.num_calibration_samples]


def _encode(folder: Path, tasks: Sequence[Task], max_seq_length: int) -> list[list[int]]:
    """Token ids of the first tokens of each prompt; conversations go through the chat template."""
    from rjax.tokenization import Tokenizer

    tokenizer = Tokenizer(folder)
    texts = [_text(task, tokenizer) for task in tasks]
    # Of a conversation, the template has written the special tokens.
    encoded = [
        tokenizer.encode(text, add_special_tokens=task.prompt is not None)[:max_seq_length]
        for task, text in zip(tasks, texts, strict=True)
    ]
    if not any(encoded):
        raise InvalidConfigError("the prompts have no tokens; give at least one that has")
    return encoded


def _text(task: Task, tokenizer: "Tokenizer") -> str:
    """The prompt, or the conversation as the chat template writes it."""
    if task.prompt is not None:
        return task.prompt
    try:
        return tokenizer.apply_chat_template(task.messages)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{task.source}: {error}") from None


def _record(found: "QuantisedCheckpoint", out: str, prompts: int, seconds: float) -> dict[str, Any]:
    settings = found.settings
    return {
        "out": out,
        "scheme": settings.scheme,
        "format": settings.format,
        "group_size": settings.group_size,
        "symmetric": settings.symmetric,
        "prompts": prompts,
        "prompt_tokens": found.prompt_tokens,
        "seconds": seconds,
        "bytes_before": found.bytes_before,
        "bytes_after": found.bytes_after,
        "error_of": "outputs" if settings.calibrated else "weights",
        "modules": [
            {"module": one.module, "relative_error": one.relative_error} for one in found.modules
        ],
    }


def _lines(found: "QuantisedCheckpoint", record: dict[str, Any]) -> list[str]:
    before, after = found.bytes_before, found.bytes_after
    worst = found.worst(_SHOWN_MODULES)
    width = max(len(one.module) for one in worst)
    groups = f" in groups of {record['group_size']}" if record["group_size"] else ""
    return [
        f"wrote {record['out']} in {record['seconds']:.1f} s: {record['scheme']}{groups}",
        f"tensors: {after / 2**20:,.1f} MiB, {after / before:.0%} of {before / 2**20:,.1f} MiB",
        f"largest relative errors of {record['error_of']}, of {len(found.modules)} projections:",
        *(f"  {one.module:{width}}  {one.relative_error:.2%}" for one in worst),
    ]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
