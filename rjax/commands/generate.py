"""The command ``rjax generate``: load a model, share a prompt, generate."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rjax.cli.arguments import (
    add_engine_arguments,
    add_sampling_arguments,
    given_engine_options,
    sampling_options,
)
from rjax.cli.errors import parse_and_run, report_error
from rjax.cli.exit_status import BAD_INPUT
from rjax.cli.one_line import one_line
from rjax.cli.parser import OneLineParser
from rjax.cli.prompts import Task, read_text, tasks_of_file, tasks_of_prompts
from rjax.cli.report import (
    answer_lines,
    as_expected,
    figure_lines,
    figures,
    reason,
    result_record,
)
from rjax.config import CacheSettings
from rjax.engine.startup_times import StartupTimes
from rjax.errors import InvalidRequestError, OutOfMemoryError
from rjax.vllm.options import instead_of

if TYPE_CHECKING:
    from rjax.api.llm import LLM
    from rjax.sampling import SamplingParams

_NAME = "rjax generate"
_DEFAULT_MAX_TOKENS = 256
_FEW_SEQUENCES = 16  # smaller steps and a smaller KV pool for at most this many

_EPILOG = """\
examples:
  rjax generate
      the bundled model answers questions about a bundled table, which is its system prompt
  rjax generate --relay off
      the same answers, with the table read once per question
  rjax generate --prompt "Who lives in Peru?" --prompt "How many people are there?"
      your own questions about that table
  rjax generate --model ./llama --system-prompt-file rules.txt --prompts-file ask.jsonl
      a model of yours; ask.jsonl holds {"prompt": "..."} or {"messages": [...]} on each line,
      with sampling values where a line needs its own: {"prompt": "...", "max_tokens": 5}
  echo "Once upon a time" | rjax generate --model ./llama --raw --prompt -
      plain completion of a text, without the chat template
  rjax generate --json --no-progress > answers.json

up to 16 answers run with --max-num-seqs 16, which starts faster, unless you give another value

exit status: 0 done, 2 bad input (the rest of a batch is still answered), 130 interrupted
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = OneLineParser(
        prog=_NAME,
        usage="%(prog)s [options]",
        description="Generate text. The KV of a prefix that prompts share is stored once and, "
        "with relay attention, read once per step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        instead=instead_of,
        positional_hint="give a prompt as --prompt, a model as --model",
    )
    prompts = parser.add_argument_group("prompts", "with none, demo questions about a table")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what to answer or complete; repeatable; - reads stdin",
    )
    prompts.add_argument(
        "--prompts-file", metavar="FILE", help="one prompt a line, or JSONL (see the examples)"
    )
    system = prompts.add_mutually_exclusive_group()
    system.add_argument(
        "--system-prompt",
        metavar="TEXT",
        help="system prompt of all prompts (default: a table for the bundled model, else none)",
    )
    system.add_argument("--system-prompt-file", metavar="FILE", help="the same from a UTF-8 file")
    prompts.add_argument(
        "--raw", action="store_true", help="complete plain text, without the chat template"
    )
    add_engine_arguments(parser, {"warmup": "auto"})
    add_sampling_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument(
        "--no-progress", action="store_true", help="no progress bars and no summary on stderr"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return parse_and_run(_NAME, build_parser(), argv, _generate)


def _generate(arguments: argparse.Namespace) -> int:
    # Everything that can be wrong with the input is found before the model is loaded.
    times = StartupTimes()
    system = _system_prompt(arguments, times)
    tasks = _tasks(arguments, times)
    given = sampling_options(arguments)
    options = given_engine_options(arguments)
    if "chat_template" in arguments:
        options["chat_template"] = read_text(arguments.chat_template, "--chat-template")
    _check_sampling(given, tasks)
    if sum(task.sampling.get("n", given.get("n", 1)) for task in tasks) <= _FEW_SEQUENCES:
        options.setdefault("max_num_seqs", _FEW_SEQUENCES)
    with times.phase("imports"):
        pass
    llm = _load(options, progress=not arguments.no_progress)
    defaults = _defaults(llm, bundled="model" not in arguments)
    params = [_params(defaults, given, task) for task in tasks]
    begin = time.monotonic()
    prompts = _encode(llm, tasks, system, raw=arguments.raw)
    shared = _common_prefix(prompts)
    page_size = options.get("page_size", CacheSettings().page_size)
    prefix_seconds = _compute_shared(llm, shared) if len(shared) >= page_size else 0.0
    outputs = llm.generate(prompts, params, use_tqdm=not arguments.no_progress)
    found = figures(
        outputs,
        llm.stats(),
        begin=begin,
        end=time.monotonic(),
        prefix_seconds=prefix_seconds,
        compiling=llm.engine.compile_progress(),
        startup_seconds=times.seconds | llm.engine.startup_seconds(),
    )
    if arguments.json:
        results = [result_record(t, o) for t, o in zip(tasks, outputs, strict=True)]
        record = {"model": arguments.__dict__.get("model"), "results": results, "stats": found}
        print(json.dumps(record, ensure_ascii=False, allow_nan=False))
    else:
        _print_answers(tasks, outputs, found)
    failed = [(t, o) for t, o in zip(tasks, outputs, strict=True) if o.error is not None]
    for task, output in failed:
        report_error(_NAME, f"{task.source}: {reason(output)}")
    return BAD_INPUT if failed else 0


def _system_prompt(arguments: argparse.Namespace, times: StartupTimes) -> str | None:
    if arguments.system_prompt_file is not None:
        return read_text(arguments.system_prompt_file, "--system-prompt-file")
    if arguments.system_prompt is not None:
        return arguments.system_prompt
    nothing_asked = not arguments.prompt and arguments.prompts_file is None
    if not arguments.raw and ("model" not in arguments or nothing_asked):
        with times.phase("imports"):
            from rjax.models.tables.demo import demo_system_prompt

        return demo_system_prompt()
    return None


def _tasks(arguments: argparse.Namespace, times: StartupTimes) -> list[Task]:
    found = tasks_of_prompts(arguments.prompt)
    if arguments.prompts_file is not None:
        found += tasks_of_file(arguments.prompts_file)
    if found:
        if arguments.raw and any(task.messages is not None for task in found):
            source = next(task.source for task in found if task.messages is not None)
            raise InvalidRequestError(f"{source}: messages need the chat template; leave out --raw")
        return found
    own_system = arguments.system_prompt is not None or arguments.system_prompt_file is not None
    if own_system or arguments.raw:
        raise InvalidRequestError("nothing to generate; give --prompt or --prompts-file")
    with times.phase("imports"):
        from rjax.models.tables.demo import demo_questions

    return [
        Task(question, source=f"demo question {i}", expected=expected)
        for i, (question, expected) in enumerate(demo_questions(), start=1)
    ]


def _check_sampling(given: Mapping[str, Any], tasks: list[Task]) -> None:
    """Refuse bad sampling values before anything is loaded."""
    from rjax.sampling import SamplingParams

    SamplingParams.from_options(given)
    for task in tasks:
        if task.sampling:
            try:
                SamplingParams.from_options({**given, **task.sampling})
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{task.source}: {error}") from error


def _load(options: dict[str, Any], *, progress: bool) -> "LLM":
    from rjax.api.llm import LLM
    from rjax.build.summary import summary_lines

    llm = LLM(**options, use_tqdm=progress)
    if progress:
        print("\n".join(summary_lines(llm.engine.summary)), file=sys.stderr)
    return llm


def _defaults(llm: "LLM", *, bundled: bool) -> dict[str, Any]:
    """Sampling values of the model, where the command line has none."""
    defaults: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_TOKENS}
    if llm.engine.tokenizer is not None:
        defaults |= llm.engine.tokenizer.generation.sampling
    if bundled:
        defaults["temperature"] = 0.0
    return defaults


def _params(defaults: Mapping[str, Any], given: Mapping[str, Any], task: Task) -> "SamplingParams":
    from rjax.sampling import SamplingParams

    own = {**given, **task.sampling}
    values = {**defaults, **own}
    if "min_tokens" in own and "max_tokens" not in own:
        values["max_tokens"] = max(values["max_tokens"], own["min_tokens"])
    return SamplingParams.from_options(values)


def _encode(
    llm: "LLM", tasks: list[Task], system: str | None, *, raw: bool
) -> list[dict[str, Any]]:
    """Prompt text and token ids of each task."""
    from rjax.tokenization import encode_shared_prefix

    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    if not raw and not tokenizer.has_chat_template:
        messages = next((task.source for task in tasks if task.messages is not None), None)
        if messages is not None:
            raise InvalidRequestError(
                f"{messages}: the model has no chat template for messages; give --chat-template"
            )
        raw = True
        print(
            f"{_NAME}: the model has no chat template: prompts are completed as plain text",
            file=sys.stderr,
        )
    if raw:
        texts = [(system or "") + (task.prompt or "") for task in tasks]
    else:
        texts = []
        for task in tasks:
            try:
                texts.append(tokenizer.apply_chat_template(_conversation(task, system)))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{task.source}: {error}") from error
    rows = encode_shared_prefix(tokenizer, texts, add_special_tokens=raw)
    return [
        {"prompt": text, "prompt_token_ids": row} for text, row in zip(texts, rows, strict=True)
    ]


def _conversation(task: Task, system: str | None) -> list[Any]:
    messages = task.messages or [{"role": "user", "content": task.prompt}]
    has_system = isinstance(messages[0], Mapping) and messages[0].get("role") == "system"
    if system and not has_system:
        return [{"role": "system", "content": system}, *messages]
    return messages


def _common_prefix(prompts: list[dict[str, Any]]) -> list[int]:
    """The longest common prefix of several prompts, shorter than each of them."""
    from rjax.tokenization import common_prefix

    if len(prompts) < 2:
        return []
    rows = [prompt["prompt_token_ids"] for prompt in prompts]
    found = common_prefix(*rows)
    return found[: min(len(found), min(map(len, rows)) - 1)]


def _compute_shared(llm: "LLM", shared: list[int]) -> float:
    """Compute the shared prefix once, before the requests. Returns the seconds it took, without
    those that steps waited for programs to compile."""
    if not shared:
        return 0.0
    begin = time.monotonic()
    try:
        llm.fill_prefix_kv_cache(shared)
    except OutOfMemoryError as error:
        note = f"the shared prefix is not pinned beyond the requests that use it: {error}"
        print(f"{_NAME}: {one_line(note)}", file=sys.stderr)
    end = time.monotonic()
    return end - begin - llm.engine.compile_progress().waited_seconds(begin, end)


def _print_answers(tasks: list[Task], outputs: list[Any], found: dict[str, Any]) -> None:
    for task, output in zip(tasks, outputs, strict=True):
        print("\n".join(answer_lines(task, output)), end="\n\n")
    known = [(t, o) for t, o in zip(tasks, outputs, strict=True) if t.expected is not None]
    if known:
        right = sum(as_expected(task, output) for task, output in known)
        print(f"answers: {right} of {len(known)} as expected")
    print("\n".join(figure_lines(found)))
