"""Results of a load test: percentiles, throughput and goodput, as rows, JSON and a picture."""

import datetime
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import rjax
from rjax.benchmarks.records import command
from rjax.benchmarks.serve_client import Measured

_NOT_SETTINGS = ("api_key", "runs_on")
PERCENTILES = (50, 95, 99)
COLUMNS = {
    "rate": "request rate, req/s",
    "completed": "done",
    "failed": "failed",
    "requests_per_s": "req/s",
    "tokens_per_s": "tok/s",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p95": "p95",
    "ttft_ms_p99": "p99 ms",
    "tpot_ms_p50": "TPOT p50",
    "tpot_ms_p95": "p95",
    "tpot_ms_p99": "p99 ms",
    "goodput": "goodput req/s",
    "cached_share": "cached",
}


def row(rate: float, done: Sequence[Measured], goodput: tuple[float, float]) -> dict[str, Any]:
    """The figures of one rate.

    Args:
        rate: requested rate, requests per second.
        done: all requests.
        goodput: limits of TTFT and TPOT in milliseconds.
    """
    good = [m for m in done if m.error is None]
    span = max((m.done for m in done), default=0.0) - min((m.sent for m in done), default=0.0)
    first = [m.first * 1000 for m in good if m.first is not None]
    each = [m.per_token * 1000 for m in good if m.per_token is not None]
    met = [
        m
        for m in good
        if m.first is not None
        and m.first * 1000 <= goodput[0]
        and (m.per_token is None or m.per_token * 1000 <= goodput[1])
    ]
    prompt = sum(m.prompt_tokens for m in good)
    found: dict[str, Any] = {
        "rate": "inf" if math.isinf(rate) else rate,
        "completed": len(good),
        "failed": len(done) - len(good),
        "seconds": span,
        "requests_per_s": len(good) / span if span else 0.0,
        "tokens_per_s": sum(m.tokens for m in good) / span if span else 0.0,
        "prompt_tokens": prompt,
        "output_tokens": sum(m.tokens for m in good),
        "cached_share": sum(m.cached_tokens for m in good) / prompt if prompt else None,
        "goodput": len(met) / span if span else 0.0,
        "errors": sorted({m.error for m in done if m.error is not None})[:5],
    }
    for name, values in (
        ("ttft_ms", first),
        ("tpot_ms", each),
        ("e2e_ms", [m.end * 1000 for m in good]),
    ):
        found[f"{name}_mean"] = float(np.mean(values)) if values else None
        for p in PERCENTILES:
            found[f"{name}_p{p}"] = float(np.percentile(values, p)) if values else None
    return found


def line(found: Mapping[str, Any]) -> str:
    """One line of progress for a rate."""
    failed = f", {found['failed']} failed ({found['errors'][0]})" if found["failed"] else ""
    first = found["ttft_ms_p50"]
    shown = "none" if first is None else f"{first:.0f} ms"
    return f"{found['rate']} req/s: {found['completed']} done{failed}, TTFT p50 {shown}"


def record(
    name: str,
    model: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    device: str | None,
) -> dict[str, Any]:
    """The result with everything needed to repeat it; ``device`` is that of the server."""
    kept = {k: v for k, v in settings.items() if k not in _NOT_SETTINGS}
    kept["rates"] = [row["rate"] for row in rows]
    return {
        "benchmark": name,
        "command": command(name),
        "environment": {
            "device": device,
            "client": platform.machine(),
            "python": platform.python_version(),
            "versions": {"rjax": rjax.__version__, "h11": version("h11")},
            "date": datetime.date.today().isoformat(),
        },
        "model": model,
        "settings": kept,
        "rows": [dict(row) for row in rows],
    }


def picture(path: Path, found: Mapping[str, Any]) -> None:
    """Latency over throughput: TTFT and TPOT percentiles of each rate, one file."""
    from rjax.benchmarks import figures

    rows = [row for row in found["rows"] if row["completed"]]
    series: dict[str, list[tuple[float, float]]] = {}
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        for p in PERCENTILES:
            points = [
                (row["requests_per_s"], row[f"{name}_p{p}"])
                for row in rows
                if row[f"{name}_p{p}"] is not None
            ]
            if points:
                series[f"{label} p{p}"] = points
    figures.lines(
        path,
        series,
        title=f"{found['model']}: latency under load",
        x="requests served a second",
        y="milliseconds",
        log="y",
    )
