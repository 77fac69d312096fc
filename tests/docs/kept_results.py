"""The parts of the pages that are made from the results in bench/results."""

import json
from typing import Any

from tests.docs.pages import ROOT, table

RESULTS = ROOT / "bench" / "results"


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


def decode_step_gpus() -> str:
    """Decode steps by the number of GPUs, from bench/results/decode_step*.json."""
    several = sorted(path.name for path in RESULTS.glob("decode_step_tp*.json"))
    kept = [_kept(name) for name in ("decode_step.json", "decode_step_fp8.json", *several)]
    found: dict[tuple[Any, ...], dict[tuple[int, int], str]] = {}
    for each in kept:
        steps = each["settings"].get("num_decode_steps", 1)
        for row in each["rows"]:
            if row["model"].startswith("llama") and row.get("layers") is None:
                case = (row["model"], row["weights"], row["batch"], row["shared"], row["own"])
                times = found.setdefault(case, {})
                times[row.get("devices") or 1, steps] = f"{row['step_ms']:.2f}"
    rows = []
    for case in sorted(found, key=lambda case: (len(case[0]), case)):  # 8b before 70b
        times = found[case]
        model, weights, batch, shared, own = case
        cells = [
            " ".join(
                text.format(times[gpus, steps])
                for steps, text in ((1, "{}"), (8, "({})"))
                if (gpus, steps) in times
            )
            for gpus in (1, 2, 4, 8)
        ]
        if any(cells[1:]):
            rows.append([model, weights, batch, f"{shared:,}", f"{own:,}", *cells])
    dates = sorted(each["environment"]["date"] for each in kept)
    about = (
        "\n\nMilliseconds; in brackets with `--num-decode-steps 8`. "
        f"{kept[0]['environment']['device']}, {_versions(kept[0])}, {dates[0]} to {dates[-1]}; "
        "from `bench/results/decode_step.json`, `decode_step_fp8.json` and `decode_step_tp*.json`."
    )
    head = ["shapes of", "weights", "sequences", "shared tokens", "unique tokens of each"]
    return table([*head, "one GPU", "two", "four", "eight"], rows) + about


def decode_step_quantised() -> str:
    """Decode steps by the scheme of the weights, from bench/results/decode_step*.json."""
    schemes = {"bfloat16": "", "fp8": "_fp8", "int4": "_int4"}
    kept = [
        _kept(f"decode_step{kind}{steps}.json")
        for steps in ("", "_multi")
        for kind in schemes.values()
    ]
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for each in kept:
        steps = each["settings"].get("num_decode_steps", 1)
        for row in each["rows"]:
            case = (row["model"], steps, row["batch"], row["shared"], row["own"])
            found.setdefault(case, {})[row["weights"]] = f"{row['step_ms']:.2f} ms"
    rows = [
        [model, steps, batch, f"{shared:,}", f"{own:,}", *(times[name] for name in schemes)]
        for (model, steps, batch, shared, own), times in found.items()
        if times.keys() == schemes.keys()
    ]
    head = ["shapes of", "steps a program", "sequences", "shared tokens", "unique tokens of each"]
    about = (
        f"\n\n{kept[0]['environment']['device']}, {_versions(kept[0])}, "
        f"{kept[0]['environment']['date']}; "
        "from `bench/results/decode_step.json`, and from the files beside it with `_fp8`, `_int4` "
        "and `_multi` in their names."
    )
    return table([*head, *schemes], rows) + about


def peers() -> str:
    """Attention beside other libraries, from bench/results/kernels_peers.json."""
    kept = _kept("kernels_peers.json")
    others = {
        "pallas_us": "Pallas `paged_attention`",
        "cudnn_us": "cuDNN through JAX",
        "cudnn_once_us": "cuDNN, prefix once and merged",
        "sdpa_us": "torch SDPA",
        "flex_us": "torch FlexAttention",
    }
    rows = []
    for row in kept["rows"]:
        times = {name: row[key] for key, name in others.items() if row.get(key) is not None}
        if times and row.get("us") is not None:
            best = min(times, key=times.__getitem__)
            ours, other = f"{row['us']:,.1f} us", f"{times[best]:,.1f} us"
            rows.append([row["case"], ours, other, best, f"{times[best] / row['us']:.2f}"])
    head = ["case", "rjax", "best other", "which", "ratio"]
    return table(head, rows) + _source(kept, "kernels_peers.json")


def logprob_errors() -> str:
    """Differences of log-probabilities, from tests/golden/logprob_errors.json."""
    kept = json.loads((ROOT / "tests/golden/logprob_errors.json").read_text(encoding="utf-8"))
    rows = []
    for name, found in kept["errors"].items():
        row = [f"`{name}`"]
        for dtype in ("float32", "bfloat16", "fp8"):
            paths = (found[dtype][path] for path in ("prefill", "decode"))
            worse = max(paths, key=lambda each: each["max"])
            row.append(f"{worse['max']:.1g}, {worse['mean']:.1g}")
        of_paths = [found[dtype]["decode - prefill"]["max"] for dtype in ("bfloat16", "fp8")]
        rows.append(row + [f"{most:.1g}" for most in of_paths])
    head = ["model", *(f"{dtype}: largest, mean" for dtype in ("float32", "bfloat16", "fp8"))]
    head += [f"decode and prefill, {dtype}" for dtype in ("bfloat16", "fp8")]
    return (
        table(head, rows)
        + f"\n\n{kept['device']}, backend xla, jax {kept['jax']}; the larger of both paths. "
        "From `python -m tests.engine.logprob_errors`."
    )


KEPT_RESULTS = (
    attention,
    decode_step,
    experts,
    startup,
    throughput,
    server_share,
    quantised_answers,
    decode_step_gpus,
    decode_step_quantised,
    peers,
    logprob_errors,
)


def _kept(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _source(kept: dict[str, Any], *names: str, dtype: str = "bfloat16, ") -> str:
    found = kept["environment"]
    files = " and ".join(f"`bench/results/{name}`" for name in names)
    return f"\n\n{found['device']}, {dtype}{_versions(kept)}, {found['date']}; from {files}."


def _versions(kept: dict[str, Any]) -> str:
    versions = kept["environment"]["versions"]
    return ", ".join(f"{name} {versions[name]}" for name in ("jax", "flax"))
