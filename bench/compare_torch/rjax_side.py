"""The rjax half of bench.compare_torch; runs in a separate process, so that it has all memory.

python -m bench.compare_torch.rjax_side TASK.json
"""

import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import measure_ceilings
from bench.decode_step.roofline import DecodeCase
from bench.decode_step.rows import Row
from bench.decode_step.step_bench import Bench
from rjax import functional
from rjax.benchmarks.records import environment
from rjax.benchmarks.throughput import run_once
from rjax.benchmarks.workload import Request
from rjax.config import AutoInt, EngineConfig
from rjax.models import load_model
from rjax.worker.programs.cache import keep_compiled


def prompts(task: dict[str, Any], batch: int, prefix: int) -> list[list[int]]:
    """The same token ids as in the torch half."""
    rng = np.random.default_rng(task["seed"])
    shared = rng.integers(0, task["vocab_size"], prefix).tolist()
    own = rng.integers(0, task["vocab_size"], (batch, task["own"])).tolist()
    return [shared + row for row in own]


def check_logits(task: dict[str, Any]) -> None:
    """Logits of the check prompts with paged KV, for the parent to compare."""
    loaded = load_model(
        task["folder"], dtype=task["dtype"], quantization=task["quantization"], progress=False
    )
    rows = jnp.asarray(prompts(task, 4, task["check_tokens"]), jnp.int32)
    setup, weights = functional.prepare(
        loaded.model, max_context=rows.shape[1], page_size=16, backend=task["backend"]
    )
    pages = 4 * -(-rows.shape[1] // 16)
    state = functional.make_state(setup, batch=4, num_pages=pages, dtype=task["dtype"])
    run = jax.jit(functools.partial(functional.prefill, setup))
    counts = jnp.full(4, rows.shape[1], jnp.int32)
    np.save(task["rjax_logits"], np.asarray(run(weights, state, rows, counts)[1]))


def engine_rows(task: dict[str, Any], relay: str, at_once: AutoInt) -> list[dict[str, Any]]:
    """Time every point with one engine; a step is the difference between a long and a short run."""
    from rjax import LLM

    points, size = task["points"], task["page_size"]
    longest = max(prefix for _, prefix in points) + task["own"] + task["steps"] + 1
    own_pages = -(-(task["own"] + task["steps"] + 1) // size) + 1
    most = max(batch for batch, _ in points)
    needed = max(-(-prefix // size) + batch * own_pages for batch, prefix in points)
    llm = LLM(
        task["folder"],
        dtype=task["dtype"],
        quantization=task["quantization"],
        dequantize="off",
        backend=task["backend"],
        enable_relay_attention=relay,  # pyright: ignore[reportArgumentType]
        max_model_len=longest,
        max_num_seqs=most,
        num_decode_steps=at_once,
        warmup="on" if at_once == "auto" else "off",
        page_size=size,
        num_pages=max(needed, -(-longest // size)) + 8,
        skip_tokenizer_init=True,
        use_tqdm=False,
    )
    rows = []
    for batch, prefix in points:
        given = prompts(task, batch, prefix)
        long, short = ([Request(p, n) for p in given] for n in (task["steps"] + 1, 1))
        for those in (long, short):  # compiles what they need
            run_once(llm, those, True)
        times = [[run_once(llm, those, True)[1] for _ in range(3)] for those in (long, short)]
        seconds = (statistics.median(times[0]) - statistics.median(times[1])) / task["steps"]
        row = {
            "system": f"rjax, engine, relay {relay}"
            + f", {at_once} steps at once" * (at_once != 1),
            "batch": batch,
            "prefix": prefix,
            "own": task["own"],
            "step_ms": 1e3 * seconds,
            "tokens_per_s": batch / seconds,
        }
        memory = jax.devices()[0].memory_stats()
        if memory and "peak_bytes_in_use" in memory:
            row["memory_gib"] = memory["peak_bytes_in_use"] / 2**30
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def step_rows(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Time every point as the bare jitted step."""
    ceilings = measure_ceilings()
    bench = Bench(
        json.loads((Path(task["folder"]) / "config.json").read_text()),
        backend=task["backend"],
        page_size=task["page_size"],
        relay="auto",
        mode="greedy",
        dtype=task["dtype"],
        quantization=task["quantization"],
    )
    rows = []
    for batch, prefix in task["points"]:
        case = DecodeCase(batch, prefix, task["own"])
        found = bench.measure(Row(task["model"], case), ceilings)
        row = {
            "system": "rjax, bare step",
            "batch": batch,
            "prefix": prefix,
            "own": task["own"],
            "step_ms": found["step_ms"],
            "tokens_per_s": 1e3 * batch / found["step_ms"],
            "floor_ms": found["floor_ms"],
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run the task."""
    task = json.loads(Path(sys.argv[1]).read_text())
    keep_compiled(EngineConfig().compilation_cache_dir)
    check_logits(task)
    rows = step_rows(task)
    for relay in task["relay"]:
        for at_once in task["decode_steps"]:
            if time.time() > task["rjax_until"]:
                print(f"rjax, relay {relay}, {at_once} steps at once: left out", file=sys.stderr)
            else:
                rows += engine_rows(task, relay, at_once)
    Path(task["rjax_out"]).write_text(json.dumps({"rows": rows, "environment": environment()}))


if __name__ == "__main__":
    main()
