"""Host time of a step, without a device.

    python -m bench.scheduler               # layers with full attention
    python -m bench.scheduler --window 128  # half of the layers have a window, as in gpt-oss

An engine with a pool of 100,000 pages, all of them in use or cached, decodes 8 to 1024 sequences.
Its worker does everything except running the step: scheduling, the step's input (batch order,
attention plan, packing), and reading the tokens. Sequences share a system prompt of 1024 tokens.
"Step" is the time if only final outputs are returned, as by ``LLM.generate``; "streamed" if every
token is. Times are means over steps of the CPU time of the engine thread; the growth is relative
to the previous row. Long-lived objects are not garbage-collected, as by ``LLM.generate`` and by the
server. Writes ``bench/results/scheduler.json`` or ``scheduler_window.json``.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time

import jax
import numpy as np

from bench.command_line import run
from rjax.api.request_runner import freeze_gc_heap
from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.page_groups import PageGroups, one_group
from rjax.batch.page_hash import PageHashes, root_key
from rjax.batch.step_limits import StepLimits
from rjax.batch.step_readout import StepReadout
from rjax.batch.step_worker import PoolSize
from rjax.cli.parser import OneLineParser
from rjax.cli.values import whole
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.parts import EngineParts
from rjax.pallas_kernels.attention.plan.host import CostModel, PlanShape
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.worker.step.builder import StepInputBuilder
from rjax.worker.step.features import step_features
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.shape import ShapeTable

PAGES, PAGE_SIZE, LENGTH, BUDGET, SPLIT = 100_000, 64, 8192, 8192, 512
_POLICY = SplitPolicy(16, 33, 64, multi_row_lanes=2, single_lane_rows=16)
SYSTEM, OWN = 1024, 512
RESULTS = pathlib.Path(__file__).parent / "results"


class HostOnlyWorker:
    """A worker that packs every step as for a GPU but does not run it; every token is 1."""

    num_host_pages = 0
    num_host_states = 0
    num_decode_steps = 1

    def __init__(self, limits: StepLimits, window: int | None) -> None:
        groups = one_group(1)
        if window is not None:
            groups = PageGroups((None, window), ((0, 0), (1, 0)))
        self.pool = PoolSize(PAGES, 1, groups.windows)
        self.shapes = ShapeTable(
            limits=limits,
            max_model_len=LENGTH,
            page_size=PAGE_SIZE,
            plan_shape=lambda rows, seqs, _, window: PlanShape(
                rows, seqs, LENGTH, min(32, rows), SPLIT, _POLICY, window
            ),
            padded_rows=lambda rows: rows,
            growth=2,
            groups=groups,
        )
        self.seconds = {"input": 0.0}
        cost = CostModel(
            single_row_item=1.0, single_row_token=0.01, multi_row_item=1.2, multi_row_token=0.012
        )
        self._input_builder = StepInputBuilder(PackedLayouts(), cost)

    def is_ready(self, sequence) -> bool:
        """Yes: there are no programs."""
        del sequence
        return True

    def admit(self, rows) -> None:
        """Do nothing: there is no sampling state."""

    def measure_page_seconds(self) -> float:
        """Some time."""
        return 1e-4

    def move(self, operations) -> None:
        """Do nothing: there are no pages."""

    def dispatch(self, batch, tables, *, may_queue, streams) -> DispatchedStep:
        """Do the host work of a step."""
        start = time.thread_time()
        rows = sum([item.stop - item.start for item in batch])
        shape = self.shapes.choose(rows=rows, seqs=len(batch))
        step_features(batch, 0)
        made = self._input_builder.build(batch, tables, shape)
        self.seconds["input"] = time.thread_time() - start
        return DispatchedStep(made.batch, np.ones(len(batch), np.int32), made.stats, rows)

    def read(self, step) -> StepReadout:
        """Tokens for all."""
        return StepReadout(step.result, None, None)


def make_engine(num_seqs: int, window: int | None = None) -> LLMEngine:
    """An engine whose pool is full of cached pages; ``window`` is that of half of the layers."""
    config = EngineConfig.from_options(
        {"max_num_seqs": num_seqs, "max_num_batched_tokens": BUDGET, "page_size": PAGE_SIZE}
    )
    limits = StepLimits(num_seqs, BUDGET)
    engine = LLMEngine(
        EngineParts(
            config=config,
            worker=HostOnlyWorker(limits, window),
            vocab_size=128,
            max_model_len=LENGTH,
            limits=limits,
            identity=root_key("bench"),
        )
    )
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    rng = np.random.default_rng(0)
    for i in range(PAGES * PAGE_SIZE // (LENGTH - 1) + 1):
        engine.add_request(f"fill{i}", rng.integers(0, 128, LENGTH - 1).tolist(), one)
    finish(engine)
    assert engine._blocks.counts().free < 2 * LENGTH // PAGE_SIZE
    return engine


def finish(engine: LLMEngine) -> None:
    """Run all requests to their end."""
    while engine.has_unfinished_requests():
        engine.step()


def measure_steps(
    engine: LLMEngine, num_seqs: int, steps: int, kind: RequestOutputKind
) -> dict[str, float]:
    """Mean milliseconds of the phases of a decode step of ``num_seqs`` sequences."""
    rng = np.random.default_rng(1)
    system = rng.integers(0, 128, SYSTEM).tolist()
    params = SamplingParams(
        temperature=0, max_tokens=4096, ignore_eos=True, detokenize=False, output_kind=kind
    )
    for i in range(num_seqs):
        own = rng.integers(0, 128, OWN + int(rng.integers(0, SPLIT))).tolist()
        engine.add_request(str(i), system + own, params)
    scheduler, worker = engine._scheduler, engine._worker
    assert isinstance(worker, HostOnlyWorker)
    while len(scheduler.running) < num_seqs or any(
        s.num_tokens - s.num_computed > 1 for s in scheduler.running
    ):
        engine.step()
    spent: list[float] = []
    schedule = scheduler.schedule

    def timed():
        start = time.thread_time()
        result = schedule()
        spent.append(time.thread_time() - start)
        return result

    scheduler.schedule = timed
    rows = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        whole = time.thread_time() - start
        row = {"schedule": spent[-1], **worker.seconds}
        rows.append({**row, "prepare": sum(row.values()), "step": whole})
    scheduler.schedule = schedule
    for i in range(num_seqs):
        engine.abort_request(str(i))
    finish(engine)
    return {name: 1e3 * statistics.fmean(row[name] for row in rows) for name in rows[0]}


def measure_lookup(tokens: int, repeats: int = 7) -> float:
    """Median milliseconds to look up a cached prompt, including hashing."""
    blocks = BlockManager(PAGES, PAGE_SIZE)
    stream = np.random.default_rng(2).integers(0, 128, tokens).tolist()
    hashes = PageHashes(b"root", PAGE_SIZE)
    hashes.extend(stream)
    pages = blocks.allocate(len(hashes.keys))
    assert pages is not None
    for n, page in enumerate(pages):
        blocks.register(page, hashes.keys[n], hashes.parent(n), hashes.blocks[n])
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        fresh = PageHashes(b"root", PAGE_SIZE)
        fresh.extend(stream)
        found = blocks.match(fresh.keys)
        times.append(time.thread_time() - start)
        assert found == pages
    return 1e3 * statistics.median(times)


def main() -> None:
    """Measure, print a table and write it as JSON."""
    parser = OneLineParser(
        prog="python -m bench.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--window", type=whole(1), help="of half of the layers, in tokens")
    parser.add_argument("--steps", type=whole(1), default=60, help="timed of each (default: 60)")
    parser.add_argument(
        "--seqs",
        type=whole(1),
        nargs="+",
        default=[8, 64, 256, 1024],
        help="running sequences (default: 8 64 256 1024)",
    )
    parser.add_argument("--output", type=pathlib.Path, help="file for the result as JSON")
    options = parser.parse_args()
    name = "scheduler.json" if options.window is None else "scheduler_window.json"
    output = options.output or RESULTS / name
    engine = make_engine(max(options.seqs), options.window)
    steps = {}
    for n in options.seqs:
        with freeze_gc_heap():
            steps[n] = measure_steps(engine, n, options.steps, RequestOutputKind.FINAL_ONLY)
            streamed = measure_steps(engine, n, options.steps, RequestOutputKind.DELTA)
        steps[n]["streamed"] = streamed["step"]
    lookups = {n: measure_lookup(n) for n in (1000, 10_000, 100_000)}
    columns = list(next(iter(steps.values())))
    print(f"{'sequences':>9}", *(f"{c + ' ms':>12}" for c in columns), f"{'growth':>8}")
    before = None
    for n, row in steps.items():
        growth = "" if before is None else f"{row['prepare'] / before[1] / (n / before[0]):8.2f}"
        print(f"{n:9}", *(f"{row[c]:12.3f}" for c in columns), growth)
        before = n, row["prepare"]
    for n, found in lookups.items():
        print(f"look-up of {n:7,} tokens: {found:7.3f} ms")
    record = {
        "command": "python -m bench.scheduler"
        + ("" if options.window is None else f" --window {options.window}"),
        "pages": PAGES,
        "page_size": PAGE_SIZE,
        "max_model_len": LENGTH,
        "split_tokens": SPLIT,
        "shared_tokens": SYSTEM,
        "own_tokens": OWN,
        "steps": {str(n): row for n, row in steps.items()},
        "lookup_ms": {str(n): found for n, found in lookups.items()},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "jax": jax.__version__,
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run("bench.scheduler", main)
