"""Generates bench/README.md and its pictures, and the figures of bench/kernels/README.md, from the
results in bench/results/.

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
    compare_engines,
    compare_torch,
    decode_step,
    load_weights,
    machine_code,
    quantised_answers,
    replicas,
    serve_replicas,
    server_share,
    startup,
    step_breakdown,
    swap,
    throughput,
)
from bench.kernels import (
    cost_model,
    peers,
    run_experts,
    run_products,
    run_sums,
    run_table,
    sweep,
)
from bench.kernels import readme as kernels_readme
from bench.longbench import __main__ as longbench
from rjax.benchmarks import latency, serve_report
from rjax.benchmarks.text_tables import markdown
from rjax.cli.parser import OneLineParser

README: Path = Path(__file__).parent / "README.md"
"""The page that this module writes."""

_INTRODUCTION = """\
# Benchmarks

`python -m bench.report` generates this page from the results in `results/`. Above each table is the
command that measured it; every command explains its options with `--help`. Seeds are fixed. On a
GPU a benchmark writes its result to `results/`; on a CPU, name a file with `--json FILE`. The
command `python -m bench.suite` runs those that need one GPU and nothing else.

| command | what it measures |
| --- | --- |
| `python -m bench.decode_step` | time of a whole decode step, compared with its roofline |
| `python -m bench.attention` | attention of one layer over prefix lengths, with and without relay |
| `python -m bench.kernels` | the attention kernels, checked, timed and compared with others |
| `python -m bench.machine_code` | code size and registers of the kernels of a step; needs no GPU |
| `rjax bench throughput` | end-to-end tokens per second |
| `python -m bench.throughput` | the same, compared with the decode step alone |
| `rjax bench latency` | time to first token, inter-token latency, end-to-end latency |
| `python -m bench.startup` | from launch to first token or answer, with and without a cache |
| `python -m bench.load_weights` | loading a checkpoint, compared with reading its files |
| `rjax bench serve` | a running server under load |
| `python -m bench.replicas` | prefix cache hits of several replicas, by request router |
| `python -m bench.serve_replicas` | a server with one replica and with several, a GPU each |
| `python -m bench.compare_engines` | the same requests through vLLM or SGLang |
| `python -m bench.compare_torch` | the same weights in torch, after a comparison of the logits |
| `python -m bench.longbench` | answers and scores on LongBench-format files, relay on and off |
| `python -m bench.table_answers` | exact answers of the bundled model about unseen tables |
| `python -m bench.quantised_answers` | the same with quantised weights, and perplexity |
| `python -m bench.scheduler` | host time of a step |
| `python -m bench.server_host` | host time of a streamed token in the server |
| `python -m bench.server_share` | a server beside its engine in process, under one load |
| `python -m bench.swap` | a step while pages are swapped to or from host memory |

The roofline is the shortest possible time: the larger of the time to move all bytes at the copy
rate and the time to compute all FLOP at the matmul rate. Weights and distinct KV are counted once.
Both rates are measured in the same run. "Unique tokens" are the tokens of a sequence after the
shared prefix.

Times are measured in short bursts. Under sustained load a GPU at its power limit lowers its clock;
columns named "sustained" show that time.
"""

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

SECTIONS: dict[str, Section] = {
    "decode_step": Section("One decode step", _decode_steps),
    "decode_step_few_rows": Section("One decode step of few rows", _decode_steps),
    "decode_step_few_rows_without": Section(
        "One decode step of few rows, without the kernel of the post-attention block",
        _decode_steps,
    ),
    "decode_step_long": Section(
        "One decode step with a long maximum sequence length", _decode_steps
    ),
    "decode_step_tp2": Section("One decode step on two GPUs", _decode_steps),
    "decode_step_tp4": Section("One decode step on four GPUs", _decode_steps),
    "decode_step_tp8": Section("One decode step on eight GPUs", _decode_steps),
    "decode_step_experts": Section("One decode step with experts", _decode_steps),
    "decode_step_growth": Section("A growing prefix", _decode_steps, decode_step.draw),
    "attention": Section("Attention of one layer", _rows(attention.COLUMNS), attention.draw),
    "kernels": Section("Kernels", _rows(run_table.COLUMNS)),
    "kernels_peers": Section("Kernels: comparison with other libraries", peers.table),
    "kernels_products": Section("GEMMs of few rows", _rows(run_products.COLUMNS)),
    "kernels_sums": Section("Sums over GPUs", _rows(run_sums.COLUMNS)),
    "kernels_experts": Section("Experts of a layer", _rows(run_experts.COLUMNS)),
    "kernels_sweep": Section("Kernels: with and without relay", _rows(sweep.COLUMNS), sweep.draw),
    "kernels_costs": Section("Cost model of the work items", _rows(cost_model.COLUMNS)),
    "machine_code": Section("Machine code", _rows(machine_code.COLUMNS)),
    "throughput": Section("Throughput", _rows(throughput.COLUMNS), throughput.draw),
    "prefill": Section("Prefill", _rows(throughput.COLUMNS)),
    "startup": Section("Start-up", _startup),
    "load_weights": Section("Loading weights", _rows(load_weights.COLUMNS)),
    "latency": Section("Latency", _rows(latency.COLUMNS), latency.draw),
    "serve": Section(
        "Serving",
        _rows(serve_report.COLUMNS),
        _draw_serve,
    ),
    "replicas": Section("Replicas", _rows(replicas.COLUMNS)),
    "serve_replicas": Section("One replica and several", _rows(serve_replicas.COLUMNS)),
    "server_share": Section("The server and its engine", _rows(server_share.COLUMNS)),
    "compare_engines": Section("Comparison with other engines", _rows(compare_engines.COLUMNS)),
    "compare_torch": Section(
        "Comparison with torch", _rows(compare_torch.COLUMNS), compare_torch.draw
    ),
    "longbench": Section("Long documents", _rows(_LONGBENCH)),
    "table_answers": Section("The bundled model's answers", _table_answers),
    "quantised_answers": Section(
        "The bundled model with quantised weights", _rows(quantised_answers.COLUMNS)
    ),
    "scheduler": Section("Host time of a step", _scheduler),
    "swap": Section("Swapping during a step", _rows(swap.COLUMNS)),
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


def render(results: Path = RESULTS) -> str:
    """The whole page."""
    pages = [_INTRODUCTION]
    for section in SECTIONS.values():
        files = [p for p in sorted(results.glob("*.json")) if section_of(p.stem) is section]
        if not files:
            continue
        pages.append(f"## {section.heading}\n")
        for path in files:
            pages.append(_shown(path, section))
    others = [p for p in sorted(results.glob("*.json")) if section_of(p.stem) is None]
    if others:
        pages.append("## Other results\n")
        pages += [f"- [{path.name}](results/{path.name})" for path in others]
        pages.append("")
    return "\n".join(pages).rstrip() + "\n"


def _shown(path: Path, section: Section) -> str:
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"`{found['command']}`", "", f"{where(found)}.", "", section.table(found), ""]
    if section.draw is not None and _picture(path).exists():
        lines += [f"![{section.heading}](results/{_picture(path).name})", ""]
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
    return {
        README: render(),
        kernels_readme.README: kernels_readme.with_figures(
            kernels_readme.README.read_text("utf-8")
        ),
    }


def main() -> int:
    """Write the pages, or check them."""
    if parser().parse_args().check:
        old = [p for p, text in pages().items() if p.read_text(encoding="utf-8") != text]
        names = " and ".join(str(path.relative_to(README.parent)) for path in old)
        print(f"out of date: {names}; run python -m bench.report" if old else "up to date")
        return 1 if old else 0
    draw_all()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
