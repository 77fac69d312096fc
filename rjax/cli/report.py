"""Output of a command: answers and figures, as text or as JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rjax.cli.one_line import one_line
from rjax.cli.prompts import Task
from rjax.outputs import CompletionOutput, Logprob, RequestOutput


def figures(
    outputs: Sequence[RequestOutput],
    stats: Any,
    *,
    seconds: float,
    prefix_seconds: float,
    compile_wait_seconds: float,
    startup_seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Token counts, speed, memory and start-up time of one run.

    The speeds do not count the time that steps waited for programs to compile; the latencies do.

    Args:
        outputs: the outputs of all requests.
        stats: the engine's `EngineStats`.
        seconds: duration of the whole run, without the start.
        prefix_seconds: part of it in which the shared prefix was computed before the requests.
        compile_wait_seconds: part of it in which steps waited for programs to compile.
        startup_seconds: of each phase of the start.
    """
    read = sum(len(o.prompt_token_ids) for o in outputs if o.error is None)
    written = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    metrics = [o.metrics for o in outputs if o.metrics is not None]
    first = [m.time_to_first_token for m in metrics if m.time_to_first_token is not None]
    each = [m.time_per_output_token for m in metrics if m.time_per_output_token is not None]
    computing = seconds - compile_wait_seconds
    return {
        "requests": len(outputs),
        "seconds": seconds,
        "startup_seconds": sum(startup_seconds.values()),
        "startup_phases": dict(startup_seconds),
        "compile_wait_seconds": compile_wait_seconds,
        "prompt_tokens": read,
        "shared_prompt_tokens": sum(o.num_cached_tokens for o in outputs),
        "read_once": stats.kv_tokens_read < stats.kv_tokens_unshared,
        "kv_tokens_read": stats.kv_tokens_read,
        "kv_tokens_read_without_sharing": stats.kv_tokens_unshared,
        "output_tokens": written,
        "input_tokens_per_second": read / computing,
        "output_tokens_per_second": written / computing,
        "prefix_seconds": prefix_seconds,
        "mean_time_to_first_token": prefix_seconds + sum(first) / len(first) if first else None,
        "mean_time_per_output_token": sum(each) / len(each) if each else None,
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
    count = found["shared_prompt_tokens"]
    first, each = found["mean_time_to_first_token"], found["mean_time_per_output_token"]
    prefix, waited = found["prefix_seconds"], found["compile_wait_seconds"]
    compiling = "including compilation" if waited else ""
    shared_part = f"{_seconds(prefix)} of it for the shared prefix" if prefix else ""
    notes = ", ".join(note for note in (shared_part, compiling) if note)
    return [
        f"prompt tokens: {found['prompt_tokens']:,}, "
        + (f"of which {count:,} {shared}" if count else "none of them shared"),
        f"speed: {found['input_tokens_per_second']:,.1f} tokens/s in, "
        f"{found['output_tokens_per_second']:,.1f} tokens/s out",
        f"time to first token: {_seconds(first)}" + _in_brackets(notes, first),
        f"time per output token: {_seconds(each)}" + _in_brackets(compiling, each),
        f"KV memory: {_bytes(found['kv_bytes'])}" + _unshared_note(found),
        f"compilation: {found['compile_wait_seconds']:.1f} s waited for, not in the speeds",
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
        return [*lines, f"E: {one_line(output.error)}"]
    for answer in output.outputs:
        label = f"A{answer.index}: " if len(output.outputs) > 1 else "A: "
        known = task.expected is not None
        mark = f"   (expected: {task.expected})" if known and not as_expected(task, output) else ""
        lines.append(label + answer.text.strip() + mark)
    return lines


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
        found["error"] = one_line(output.error)
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


def _in_brackets(note: str, value: float | None) -> str:
    return f" ({note})" if note and value is not None else ""


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
