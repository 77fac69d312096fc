"""Output of a command: answers and figures, as text or as JSON."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rjax.batch.compile_progress import CompileProgress
from rjax.cli.one_line import one_line
from rjax.cli.prompts import Task
from rjax.outputs import CompletionOutput, Logprob, RequestOutput


class _Span(NamedTuple):
    """Moments of a request that has ended, its samples, and the tokens of its longest one."""

    arrival: float
    first: float
    last: float
    samples: int
    tokens: int

    @classmethod
    def of(cls, output: RequestOutput) -> "_Span | None":
        found = output.metrics
        if found is None or found.first_token_time is None or found.finished_time is None:
            return None
        moments = found.arrival_time, found.first_token_time, found.finished_time
        return cls(*moments, len(output.outputs), found.num_generated_tokens)


def figures(
    outputs: Sequence[RequestOutput],
    stats: Any,
    *,
    begin: float,
    end: float,
    prefix_seconds: float,
    compiling: CompileProgress,
    startup_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Token counts, speed, memory and start-up time of one run.

    Speeds and latencies leave out the time in which steps waited for programs to compile. Prompts
    are read until the last request has its first token; generation lasts from the earliest first
    token to the last token.

    Args:
        outputs: the outputs of all requests.
        stats: the engine's `EngineStats`.
        begin: when the run began, without the start, by ``time.monotonic``.
        end: when it ended.
        prefix_seconds: time in which the shared prefix was computed before the requests.
        compiling: progress of the compilation at the end.
        startup_seconds: seconds of each phase of the start, by name.
    """

    def computing(since: float, until: float) -> float:
        return until - since - compiling.waited_seconds(since, until)

    read = sum(len(o.prompt_token_ids) for o in outputs if o.error is None)
    written = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    spans = [span for o in outputs if (span := _Span.of(o)) is not None]
    first_waits = [computing(span.arrival, span.first) for span in spans]
    gaps = [computing(s.first, s.last) / (s.tokens - 1) for s in spans if s.tokens > 1]
    read_seconds = written_seconds = 0.0
    later = 0  # tokens after the earliest
    if spans:
        earliest = min(span.first for span in spans)
        read_seconds = computing(begin, max(span.first for span in spans))
        written_seconds = computing(earliest, max(span.last for span in spans))
        later = written - sum(span.samples for span in spans if span.first == earliest)
    return {
        "requests": len(outputs),
        "seconds": end - begin,
        "startup_seconds": sum(startup_seconds.values()),
        "startup_phases": dict(startup_seconds),
        "compile_wait_seconds": compiling.waited_seconds(begin, end),
        "prompt_tokens": read,
        "shared_prompt_tokens": sum(o.num_cached_tokens for o in outputs),
        "read_once": stats.kv_tokens_read < stats.kv_tokens_unshared,
        "kv_tokens_read": stats.kv_tokens_read,
        "kv_tokens_read_without_sharing": stats.kv_tokens_unshared,
        "output_tokens": written,
        "input_tokens_per_second": read / read_seconds if read_seconds > 0 else None,
        "output_tokens_per_second": later / written_seconds if written_seconds > 0 else None,
        "prefix_seconds": prefix_seconds,
        "mean_time_to_first_token": prefix_seconds + fmean(first_waits) if first_waits else None,
        "mean_time_per_output_token": fmean(gaps) if gaps else None,
        "kv_bytes": stats.peak_kv_bytes,
        "kv_bytes_without_sharing": stats.peak_kv_bytes_unshared,
        "max_num_seqs": stats.max_num_seqs,
        "steps": stats.steps,
        "multi_steps": stats.multi_steps,
        "preemptions": stats.preemptions,
        "backend": stats.backend,
        "device": stats.device,
    }


def figure_lines(found: dict[str, Any]) -> list[str]:
    """The figures as text, one line each."""
    shared = "shared and read once" if found["read_once"] else "stored once, read by each request"
    count, prefix = found["shared_prompt_tokens"], found["prefix_seconds"]
    first, each = found["mean_time_to_first_token"], found["mean_time_per_output_token"]
    speeds = [
        f"{speed:,.1f} {name} tokens/s"
        for name, key in (("prompt", "input"), ("generated", "output"))
        if (speed := found[f"{key}_tokens_per_second"]) is not None
    ]
    of_prefix = f" ({_seconds(prefix)} of it for the shared prefix)" if first and prefix else ""
    waited = found["compile_wait_seconds"]
    return [
        f"prompt tokens: {found['prompt_tokens']:,}, "
        + (f"of which {count:,} {shared}" if count else "none of them shared"),
        f"speed: {', '.join(speeds) or 'none'}",
        f"time to first token: {_seconds(first)}{of_prefix}",
        f"time per output token: {_seconds(each)}",
        f"KV memory: {_bytes(found['kv_bytes'])}" + _unshared_note(found),
        f"compilation: {waited:.1f} s waited for, not in the speeds and times above",
        _startup_line(found),
    ]


def _unshared_note(found: Mapping[str, Any]) -> str:
    without = found["kv_bytes_without_sharing"]
    if without <= found["kv_bytes"]:
        return ""
    return f"; without sharing it would be {_bytes(without)}"


def _startup_line(found: Mapping[str, Any]) -> str:
    phases = ", ".join(f"{name} {value:.1f}" for name, value in found["startup_phases"].items())
    return (
        f"started in {found['startup_seconds']:.1f} s: {phases}; "
        f"up to {found['max_num_seqs']} sequences at once"
    )


def answer_lines(task: Task, output: RequestOutput) -> list[str]:
    """The lines that show a question and its answers."""
    lines = [f"Q: {task.shown}"]
    if output.error is not None:
        return [*lines, f"E: {reason(output)}"]
    for answer in output.outputs:
        label = f"A{answer.index}: " if len(output.outputs) > 1 else "A: "
        known = task.expected is not None
        mark = f"   (expected: {task.expected})" if known and not as_expected(task, output) else ""
        lines.append(label + answer.text.strip() + mark)
    return lines


def reason(output: RequestOutput) -> str:
    """The error of a request as one line, without its place in the list, which the source of the
    task says."""
    assert output.error is not None
    return one_line(output.error).removeprefix(f"prompts[{output.prompt_index}]: ")


def as_expected(task: Task, output: RequestOutput) -> bool:
    """Whether every answer equals the expected one."""
    return bool(output.outputs) and all(
        answer.text.strip() == task.expected for answer in output.outputs
    )


def result_record(task: Task, output: RequestOutput) -> dict[str, Any]:
    """A request and its outputs for JSON; infinite numbers and NaN become null."""
    found: dict[str, Any] = {
        "source": task.source,
        "prompt": task.shown,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "outputs": [_completion_record(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [_logprobs_record(entry) for entry in output.prompt_logprobs]
    if task.expected is not None:
        found["expected"] = task.expected
        found["as_expected"] = as_expected(task, output)
    if output.error is not None:
        found["error"] = reason(output)
    return found


def _completion_record(completion: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        found["cumulative_logprob"] = _finite(completion.cumulative_logprob)
        found["logprobs"] = [_logprobs_record(entry) for entry in completion.logprobs]
    return found


def _logprobs_record(entry: dict[int, Logprob] | None) -> list[dict[str, Any]] | None:
    if entry is None:
        return None
    return [
        {
            "token_id": token,
            "logprob": _finite(found.logprob),
            "rank": found.rank,
            "token": found.decoded_token,
        }
        for token, found in entry.items()
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _seconds(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _bytes(value: int) -> str:
    """A size in GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value / 2**10:,.1f} KiB"
