"""The parts of the pages that are made from the code and from kept results.

Between ``<!-- generated: NAME -->`` and ``<!-- end -->`` a page holds the text of one function of
`BLOCKS`. This writes all of them again:

    python -m tests.docs.generated
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from rjax.chat.session import _HELP
from rjax.cli.arguments import _VLLM_FLAGS, PYTHON_ONLY, flag_of
from rjax.config import EngineConfig
from rjax.config.option_docs import engine_option_docs, engine_options
from rjax.engine.stats import EngineStats
from rjax.engine_channel.facts import facts_of
from rjax.models.families import FAMILIES
from rjax.models.families.rope_fields import ROPE_KINDS
from rjax.serve.loading.service_builder import _cache_figures
from rjax.serve.telemetry.metrics import Metrics
from rjax.vllm.names import (
    ARGUMENTS,
    BEAM_FIELDS,
    ENGINE_ARGUMENTS,
    METHODS,
    PROMPT_KEYS,
    RESET_ARGUMENTS,
    SAMPLING_FIELDS,
    STRUCTURED_FIELDS,
)
from rjax.vllm.options import _INSTEAD, ENGINE_NO_OPS, OPTION_NO_OPS, SERVER_NO_OPS
from tests.docs.pages import DOCS, ROOT

GOLDENS = ROOT / "tests" / "golden"
RESULTS = ROOT / "bench" / "results"
EXAMPLES = sorted((ROOT / "rjax" / "examples").glob("[!_]*.py"))


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def models() -> str:
    """The families, from their registry, and the goldens that each is checked against."""
    goldens = _goldens()
    rows = []
    for name, family in FAMILIES.items():
        kinds = family.fields.constraints["model_type"].allowed.split(":")[0]
        rows.append(
            [
                family.models,
                f"`{name}`",
                f"`{kinds.replace(' or ', '`, `')}`",
                ", ".join(f"{count} of {version}" for version, count in goldens[name].items()),
            ]
        )
    kinds = ", ".join(f"`{kind}`" for kind in sorted(ROPE_KINDS))
    head = ["models", "`architectures`", "`model_type`", "checked against"]
    return (
        table(head, rows)
        + "\n\nThe last column counts random small models of the family whose logits and greedy "
        "tokens equal those of that version of transformers.\n\n"
        f"The type of rope scaling is one of {kinds}; Phi-3 has only `default` and `longrope`."
    )


def _goldens() -> dict[str, Counter[str]]:
    """Per architecture, the goldens made by each version of transformers."""
    found: dict[str, Counter[str]] = {}
    for folder in (GOLDENS, GOLDENS / "families", GOLDENS / "experts"):
        version = json.loads((folder / "versions.json").read_text(encoding="utf-8"))["transformers"]
        for config in sorted((folder / "models").glob("*/config.json")):
            [name] = json.loads(config.read_text(encoding="utf-8"))["architectures"]
            found.setdefault(name, Counter())[f"transformers {version}"] += 1
    return found


def constraints() -> str:
    """What config.json may say of the fields that rjax does not read, by family."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        for field, constraint in family.fields.constraints.items():
            if field != "model_type":
                short = name.removesuffix("ForCausalLM")
                found.setdefault((field, constraint.allowed), []).append(short)
    rows = [
        [f"`{field}`", allowed, "all" if len(names) == len(FAMILIES) else ", ".join(names)]
        for (field, allowed), names in sorted(found.items())
    ]
    return table(["field", "must be", "families"], rows)


def options() -> str:
    """The engine's options with their flags, defaults and documentation."""
    texts, rows = engine_option_docs(), []
    for name, field in engine_options().items():
        flag = "" if name in PYTHON_ONLY else f"`{flag_of(name)}`"
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        rows.append([f"`{name}`", flag, default, texts[name].replace("``", "`")])
    return table(["option", "flag", "default", "meaning"], rows)


def vllm_names() -> str:
    """Flags that may be given under vLLM's name."""
    rows = [
        [f"`{name}`", f"`{flag_of(option)}`"]
        for option, names in _VLLM_FLAGS.items()
        for name in names
    ]
    return table(["vLLM", "rjax"], rows)


def vllm_no_ops() -> str:
    """Flags of vLLM that are accepted and have no effect."""
    texts = ENGINE_NO_OPS | SERVER_NO_OPS
    return table(["flag", "why"], [[f"`{flag}`", text] for flag, text in texts.items()])


def vllm_names_refused() -> str:
    """Fields, arguments, keys and methods of vLLM's classes, and what takes their place."""
    parts = {
        "`SamplingParams`": SAMPLING_FIELDS,
        "`StructuredOutputsParams`": STRUCTURED_FIELDS,
        "`BeamSearchParams`": BEAM_FIELDS,
        "`generate`, `chat`, `beam_search`": ARGUMENTS,
        "`reset_prefix_cache`": RESET_ARGUMENTS,
        "`LLMEngine.from_engine_args`": ENGINE_ARGUMENTS,
        "a prompt's keys": PROMPT_KEYS,
        "methods of `LLM` and `AsyncLLM`": METHODS,
    }
    rows = []
    for part, known in parts.items():
        names: dict[str, list[str]] = {}
        for name, why in known.items():
            names.setdefault(why, []).append(f"`{name}`")
        rows += [[part, ", ".join(same), why] for why, same in names.items()]
    return table(["of", "name", "instead"], rows)


def vllm_option_no_ops() -> str:
    """Options of vLLM's Python classes that are accepted and have no effect."""
    return table(["option", "why"], [[f"`{name}`", why] for name, why in OPTION_NO_OPS.items()])


def vllm_instead() -> str:
    """Flags of vLLM that are refused, and what takes their place."""
    rows = [[", ".join(f"`{flag}`" for flag in flags.split()), text] for flags, text in _INSTEAD]
    return table(["flags", "instead"], rows)


def exposition() -> str:
    """What /metrics answers, with a sample of every metric."""
    stats = EngineStats(backend="xla", device="1 x cpu", page_bytes=1)
    engine = SimpleNamespace(
        config=EngineConfig(),
        stats=lambda: stats,
        model_config=SimpleNamespace(vocab_size=1),
        max_model_len=1,
        tokenizer=None,
        summary={},
    )
    return Metrics("m", _cache_figures(facts_of(engine))).exposition(stats).decode()


def metrics() -> str:
    """The metrics with the prefix rjax, from the server's exposition."""
    return _metrics("rjax:")


def vllm_metrics() -> str:
    """Those with vLLM's own names."""
    return _metrics("vllm:")


def _metrics(prefix: str) -> str:
    rows = []
    for family in text_string_to_metric_families(exposition()):
        if family.name.endswith("_created") or not family.name.startswith(prefix):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        common = {"model_name", "engine", "le"}
        labels = {label for s in family.samples for label in s.labels} - common
        rows.append([f"`{name}`", family.type, ", ".join(sorted(labels)), family.documentation])
    return table(["metric", "type", "labels", "meaning"], sorted(rows))


def chat() -> str:
    """The chat's commands."""
    return f"```text\n{_HELP.strip()}\n```"


def examples() -> str:
    """The examples with the first line of their docstrings."""
    rows = []
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append([f"`{path.stem}`", text.splitlines()[0].replace("``", "`")])
    return table(["example", "what it shows"], rows)


def attention() -> str:
    """The gain of reading a prefix once, from bench/results/attention.json."""
    kept = _kept("attention.json")
    rows = [
        [
            f"{row['prefix']:,}",
            f"{row['plain_us']:,.0f} us",
            f"{row['relay_us']:,.0f} us",
            f"{row['plain_us'] / row['relay_us']:.1f}",
        ]
        for row in kept["rows"]
        if row["own"] == 128 and row["batch"] == 128
    ]
    head = ["shared tokens", "read by each sequence", "read once", "speed-up"]
    return table(head, rows) + _source(kept, "attention.json")


def decode_step() -> str:
    """Whole decode steps, from bench/results/decode_step.json and decode_step_growth.json."""
    kept, growth = _kept("decode_step.json"), _kept("decode_step_growth.json")
    rows = kept["rows"] + [row for row in growth["rows"] if row["shared"] > 2048]
    shown = [
        [row["model"], row["batch"], f"{row['shared']:,}", f"{row['own']:,}"]
        + [f"{row[name]:.2f} ms" for name in ("step_ms", "sustained_ms", "floor_ms")]
        for row in rows
    ]
    head = ["shapes of", "sequences", "shared tokens", "unique tokens of each"]
    head += ["decode step", "sustained", "lower bound"]
    return table(head, shown) + _source(kept, "decode_step.json", "decode_step_growth.json")


def experts() -> str:
    """Decode steps of mixtures of experts, from bench/results/decode_step_experts*.json."""
    names = [f"decode_step_experts{kind}.json" for kind in ("", "_fp8", "_mxfp4")]
    kept = [_kept(name) for name in names]
    rows = [row for each in kept for row in each["rows"]]
    rows.sort(key=lambda row: -row["model"].startswith("qwen3"))
    shown = [
        [row["model"], row["weights"], row["batch"], f"{row['shared']:,}", f"{row['own']:,}"]
        + [f"{row[name]:.2f} ms" for name in ("step_ms", "floor_ms")]
        for row in rows
    ]
    head = ["shapes of", "weights", "sequences", "shared tokens", "unique tokens of each"]
    head += ["decode step", "lower bound"]
    return table(head, shown) + _source(kept[0], *names, dtype="")


def startup() -> str:
    """From launch to the first token, from bench/results/startup.json."""
    kept = _kept("startup.json")
    engines = [row for row in kept["rows"] if row["kind"] == "engine"]
    rows = [
        [row["cache"], f"{row['total_s']:.0f} s", f"{row['all_compiled_s']:.0f} s"]
        for row in engines
    ]
    settings = kept["settings"]
    about = (
        f"An engine with the shapes of {engines[0]['model']}, random weights, `max_model_len` "
        f"{settings['max_model_len']:,}, `max_num_seqs` {settings['max_num_seqs']} and `warmup` "
        f'"{engines[0]["warmup"]}", from the launch of the process:\n\n'
    )
    head = ["cache", "first token", "all programs compiled"]
    return about + table(head, rows) + _source(kept, "startup.json")


def throughput() -> str:
    """The throughput with and without relay, from bench/results/throughput.json."""
    kept = _kept("throughput.json")
    first = kept["rows"][0]
    rows = [
        [row["relay"], f"{row['output_per_s']:,.0f}", f"{row['total_per_s']:,.0f}"]
        for row in kept["rows"]
    ]
    head = ["relay", "output tokens/s", "tokens/s with prompts"]
    about = (
        f"{first['requests']} requests to a model of the shapes of {first['model']}, "
        f"{first['running']} at a time. Each has {first['prefix']:,} shared and "
        f"{first['input']:,} unique prompt tokens, and generates {first['output']:,}.\n\n"
    )
    return about + table(head, rows) + _source(kept, "throughput.json")


def server_share() -> str:
    """The server beside its engine, from bench/results/server_share.json and its 1,024 streams."""
    kept, more = _kept("server_share.json"), _kept("server_share_1024.json")
    rows = [
        [
            row["work"],
            f"{row['streams']:,}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['share']:.2f}",
            *(f"{row[name]:,.0f}" for name in ("ttft_ms_p99", "gap_ms_p50", "gap_ms_p99")),
            f"{row['cores']:.1f}",
        ]
        for row in (*kept["rows"], *more["rows"])
        if "cores" in row
    ]
    head = ["streams of", "at once", "output tokens/s", "of `LLM.generate`"]
    head += ["TTFT p99, ms", "gap p50, ms", "gap p99, ms", "cores of the front end"]
    source = _source(kept, "server_share.json", "server_share_1024.json")
    return table(head, rows) + source


def quantised_answers() -> str:
    """The quantised bundled model, from bench/results/quantised_answers_cpu.json."""
    kept = _kept("quantised_answers_cpu.json")
    rows = [
        [
            row["weights"],
            f"{row['right']} of {row['asked']} ({row['accuracy_percent']:.1f} %)",
            f"{row['table_perplexity']:.3f}",
            f"{1000 * row['answer_loss']:.2f}",
            f"{row['tensor_mb']:.1f} MB",
        ]
        for row in kept["rows"]
    ]
    head = ["weights", "exact answers", "perplexity of tables"]
    head += ["loss of answers, 0.001 nat/token", "tensors"]
    settings, found = kept["settings"], kept["environment"]
    about = (
        f"\n\n{settings['questions']} questions about each of {settings['tables']} tables of "
        f"{settings['rows']} rows with {settings['values']} names and values. Activations are "
        f"{kept['rows'][0]['activations']}, groups have {kept['rows'][-1]['group_size']} inputs, "
        f"AWQ searched on {kept['rows'][-1]['calibration_tokens']:,} tokens of other tables. "
        f"{found['device']}, jax {found['versions']['jax']}, {found['date']}; from "
        "`bench/results/quantised_answers_cpu.json`, by `"
    )
    return table(head, rows) + about + kept["command"] + "`."


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        models,
        constraints,
        options,
        vllm_names,
        vllm_no_ops,
        vllm_names_refused,
        vllm_option_no_ops,
        vllm_instead,
        metrics,
        vllm_metrics,
        chat,
        examples,
        attention,
        decode_step,
        experts,
        startup,
        throughput,
        server_share,
        quantised_answers,
    )
}


def filled(text: str) -> str:
    """A page with its generated parts made again."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}"

    pattern = r"^(<!-- generated: (\w+) -->)$.*?^(<!-- end -->)$"
    return re.sub(pattern, part, text, flags=re.MULTILINE | re.DOTALL)


def generated_pages() -> list[Path]:
    """The pages with generated parts."""
    pages = sorted(DOCS.rglob("*.md"))
    return [page for page in pages if "<!-- generated" in page.read_text(encoding="utf-8")]


def _kept(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _source(kept: dict[str, Any], *names: str, dtype: str = "bfloat16, ") -> str:
    found = kept["environment"]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("jax", "flax"))
    files = " and ".join(f"`bench/results/{name}`" for name in names)
    return f"\n\n{found['device']}, {dtype}{versions}, {found['date']}; from {files}."


if __name__ == "__main__":
    for page in generated_pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
