"""Generates the pages and pictures in bench/results/ from the results there.

    python -m bench.report            # write
    python -m bench.report --check    # fail if the pages differ from the results

No table or picture contains handwritten figures.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import (
    RESULTS,
    attention,
    quantised_answers,
    replicas,
    serve_replicas,
    server_share,
    swap,
    throughput,
    update_weights,
)
from bench.compare_engines import __main__ as compare_engines
from bench.compare_torch import __main__ as compare_torch
from bench.decode_step import __main__ as decode_step
from bench.decode_step import breakdown as step_breakdown
from bench.kernels import (
    cost_model,
    run_delta,
    run_experts,
    run_peers,
    run_products,
    run_sums,
    run_table,
    sweep,
)
from bench.load_weights import __main__ as load_weights
from bench.longbench import __main__ as longbench
from bench.machine_code import __main__ as machine_code
from bench.rollout import __main__ as rollout
from bench.startup import __main__ as startup
from rjax.benchmarks import latency, serve_report
from rjax.benchmarks.text_tables import markdown
from rjax.cli.parser import OneLineParser

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """How the page shows the results of one benchmark.

    Attributes:
        heading: title of the section.
        table: converts a record to Markdown.
        draw: draws a record to a picture file; None for no picture.
    """

    heading: str
    table: Callable[[Record], str]
    draw: Callable[[Any, Path], None] | None = None


def _rows(columns: Mapping[str, str]) -> Callable[[Record], str]:
    def table(found: Record) -> str:
        rows = found["rows"]
        used = {k: v for k, v in columns.items() if any(row.get(k) is not None for row in rows)}
        return markdown(rows, used)

    return table


def _startup(found: Record) -> str:
    return startup.tables(found["rows"], markdown)


def _decode_steps(found: Record) -> str:
    table = _rows(decode_step.COLUMNS)(found)
    kinds = step_breakdown.breakdown(found)
    if not kinds:
        return table
    title = "Time by kind of kernel, from the profiler:"
    columns = step_breakdown.COLUMNS
    used = {key: name for key, name in columns.items() if any(row.get(key) for row in kinds)}
    return f"{table}\n\n{title}\n\n{markdown(kinds, used)}"


def _table_answers(found: Record) -> str:
    rows = [{"kind": name, **scores} for name, scores in found["scores"].items()]
    return markdown(rows, {key: key for key in dict.fromkeys(k for row in rows for k in row)})


def _scheduler(found: Record) -> str:
    rows = [{"running": int(count), **times} for count, times in found["steps"].items()]
    columns = {key: f"{key}, ms" for key in rows[0] if key != "running"}
    return markdown(rows, {"running": "running sequences"} | columns)


def _draw_serve(found: Any, path: Path) -> None:
    serve_report.picture(path, found)


# Its speed is not meaningful: there are few, short answers.
_LONGBENCH = {key: name for key, name in longbench.COLUMNS.items() if key != "tokens_per_s"}


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """One page about results.

    Attributes:
        title: of the page.
        introduction: what its tables show.
        sections: by the stem of the result files; "NAME_cpu" belongs to "NAME".
    """

    title: str
    introduction: str
    sections: Mapping[str, Section]


PAGES: dict[str, Page] = {
    "decode_step": Page(
        "Decode step",
        "Device time of a whole decode step on one GPU: embedding, layers, attention, logits and "
        "sampling.",
        {
            "decode_step": Section("One decode step", _decode_steps),
            "decode_step_few_rows": Section("8 and 16 rows", _decode_steps),
            "decode_step_few_rows_without": Section(
                "8 and 16 rows, without the kernel of the post-attention block", _decode_steps
            ),
            "decode_step_long": Section("Maximum sequence length of 131,072", _decode_steps),
            "decode_step_growth": Section("A growing prefix", _decode_steps, decode_step.draw),
        },
    ),
    "decode_step_gpus": Page(
        "Decode step on several GPUs",
        "Device time of a whole decode step with tensor parallelism. The roofline is that of the "
        "share of one GPU; sums over the GPUs count as free.",
        {
            "decode_step_tp2": Section("Two GPUs", _decode_steps),
            "decode_step_tp4": Section("Four GPUs", _decode_steps),
            "decode_step_tp8": Section("Eight GPUs", _decode_steps),
            "kernels_sums": Section("Sums over GPUs", _rows(run_sums.COLUMNS)),
        },
    ),
    "experts": Page(
        "Mixtures of experts",
        "Weights are random, so routing is about uniform, which reads the most experts.",
        {
            "decode_step_experts": Section("One decode step", _decode_steps),
            "decode_step_hybrid_fp8": Section(
                "One decode step with gated delta nets, fp8", _decode_steps
            ),
            "kernels_experts": Section("Experts of a layer", _rows(run_experts.COLUMNS)),
        },
    ),
    "attention": Page(
        "Attention",
        "Every result is checked against float32 before it is timed.",
        {
            "attention": Section(
                "Attention of one layer", _rows(attention.COLUMNS), attention.draw
            ),
            "kernels": Section("Kernels", _rows(run_table.COLUMNS)),
            "kernels_peers": Section("Comparison with other libraries", run_peers.table),
            "kernels_sweep": Section("With and without relay", _rows(sweep.COLUMNS), sweep.draw),
            "kernels_delta": Section("Gated delta rule of a layer", _rows(run_delta.COLUMNS)),
            "kernels_costs": Section("Cost model of the work items", _rows(cost_model.COLUMNS)),
        },
    ),
    "gemm": Page(
        "GEMMs and machine code",
        "GEMMs of few rows by weight scheme, and the machine code of all kernels of a step.",
        {
            "kernels_products": Section("GEMMs of few rows", _rows(run_products.COLUMNS)),
            "machine_code": Section("Machine code", _rows(machine_code.COLUMNS)),
        },
    ),
    "engine": Page(
        "Engine",
        "Requests through the engine in process: throughput, latency, host time and swapping.",
        {
            "throughput": Section("Throughput", _rows(throughput.COLUMNS), throughput.draw),
            "prefill": Section("Prefill", _rows(throughput.COLUMNS)),
            "rollout": Section("Group sampling", _rows(rollout.COLUMNS)),
            "rollout_refill": Section("Group sampling with refill", _rows(rollout.COLUMNS)),
            "latency": Section("Latency", _rows(latency.COLUMNS), latency.draw),
            "scheduler": Section("Host time of a step", _scheduler),
            "swap": Section("Swapping during a step", _rows(swap.COLUMNS)),
            "update_weights": Section(
                "New weights in a running engine", _rows(update_weights.COLUMNS)
            ),
        },
    ),
    "startup": Page(
        "Start-up",
        "Time from launch to the first token or answer, with an empty and with a filled "
        "compilation cache, and the time to load weights.",
        {
            "startup": Section("Start-up", _startup),
            "load_weights": Section("Loading weights", _rows(load_weights.COLUMNS)),
        },
    ),
    "server": Page(
        "Server",
        "Requests over HTTP, to one engine and to several replicas.",
        {
            "server_share": Section("The server and its engine", _rows(server_share.COLUMNS)),
            "serve": Section("Serving", _rows(serve_report.COLUMNS), _draw_serve),
            "replicas": Section("Replicas", _rows(replicas.COLUMNS)),
            "serve_replicas": Section("One replica and several", _rows(serve_replicas.COLUMNS)),
        },
    ),
    "comparisons": Page(
        "Comparison with other engines",
        "The same requests, or the same weights, in rjax and in other engines.",
        {
            "compare_engines": Section("vLLM and SGLang", _rows(compare_engines.COLUMNS)),
            "compare_torch": Section("torch", _rows(compare_torch.COLUMNS), compare_torch.draw),
        },
    ),
    "answers": Page(
        "Answers",
        "What models answer, with relay on and off and with quantised weights.",
        {
            "table_answers": Section("The bundled model's answers", _table_answers),
            "quantised_answers": Section(
                "The bundled model with quantised weights", _rows(quantised_answers.COLUMNS)
            ),
            "longbench": Section("Long documents", _rows(_LONGBENCH)),
        },
    ),
}
_NOTE = (
    "Generated by `python -m bench.report`; above each table is the command that measured it. "
    "[How to read the tables](../README.md#read-the-tables)."
)
SECTIONS: dict[str, Section] = {
    stem: section for page in PAGES.values() for stem, section in page.sections.items()
}


def section_of(stem: str) -> Section | None:
    """The section of a result file; "NAME_cpu" belongs to "NAME"."""
    while stem not in SECTIONS:
        stem, _, tail = stem.rpartition("_")
        if not tail or not stem:
            return None
    return SECTIONS[stem]


def where(found: Record) -> str:
    """Device, backend, versions and date of a result."""
    environment = found.get("environment", found)
    versions = environment.get("versions") or {
        name: environment[name] for name in ("jax", "jaxlib") if name in environment
    }
    facts = [
        environment.get("device"),
        f"{found['backend']} attention" if "backend" in found else None,
        ", ".join(f"{name} {number}" for name, number in versions.items()),
        environment.get("date"),
    ]
    return "; ".join(fact for fact in facts if fact)


def render(results: Path = RESULTS) -> dict[str, str]:
    """The pages by name; "other" lists the results that belong to no section."""
    files = sorted(results.glob("*.json"))
    found = {}
    for name, page in PAGES.items():
        parts = [f"# {page.title}\n\n{page.introduction} {_NOTE}\n"]
        for section in page.sections.values():
            shown = [_shown(path, section) for path in files if section_of(path.stem) is section]
            parts += [f"## {section.heading}\n", *shown] if shown else []
        if len(parts) > 1:
            found[name] = "\n".join(parts).rstrip() + "\n"
    others = [path.name for path in files if section_of(path.stem) is None]
    if others:
        links = "\n".join(f"- [{name}]({name})" for name in others)
        found["other"] = f"# Other results\n\n{links}\n"
    return found


def _shown(path: Path, section: Section) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"`{found['command']}`", "", f"{where(found)}; [{path.name}]({path.name}).", ""]
    lines += [section.table(found), ""]
    if section.draw is not None and _picture(path).exists():
        lines += [f"![{section.heading}]({_picture(path).name})", ""]
    return "\n".join(lines)


def draw_all(results: Path = RESULTS) -> None:
    """Draw the picture of every result that has one."""
    for path in sorted(results.glob("*.json")):
        section = section_of(path.stem)
        if section is not None and section.draw is not None:
            section.draw(json.loads(path.read_text(encoding="utf-8")), _picture(path))


def _picture(path: Path) -> Path:
    return path.with_suffix(".png")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneLineParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    return p


def pages() -> dict[Path, str]:
    """Every generated page and its content."""
    return {RESULTS / f"{name}.md": text for name, text in render().items()}


def main() -> int:
    """Write the pages, or check them."""
    if parser().parse_args().check:
        old = [p for p, text in pages().items() if _read(p) != text]
        names = " and ".join(str(path.relative_to(RESULTS.parent)) for path in old)
        print(f"out of date: {names}; run python -m bench.report" if old else "up to date")
        return 1 if old else 0
    draw_all()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
