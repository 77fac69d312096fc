"""Attention of one layer for many requests that share a prefix, with and without relay.

    python -m bench.attention                                   # the figure of the paper, on a GPU
    python -m bench.attention --batch 1,8 --prefix 64,512 --own 32 --heads 4,2 --head-dim 32

For each number of requests, number of unique tokens and prefix length: the time of decode
attention if every request reads the prefix (plain) and if it is read once (relay), both from pages,
and the KV memory with and without sharing. "With graphs" is a chain of calls that XLA replays as
CUDA graphs (command buffers). "Without graphs" is the same program launched kernel by kernel.
"Single call" includes the launch from Python and the synchronisation. A CPU has no graphs. (The
stand-alone experiment of RelayAttention, Zhu et al., ACL 2024.)
"""

import argparse
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import command_parser, keep, run, save_part
from bench.kernels.cases.attention import Case, Inputs, make_inputs
from bench.kernels.check import errors
from bench.kernels.timing import seconds_per_call
from rjax.benchmarks.figures import lines
from rjax.benchmarks.points import in_time
from rjax.benchmarks.records import record
from rjax.cli.values import whole, wholes
from rjax.commands.bench.options import add_time_limit
from rjax.config import PAGE_SIZES, EngineConfig
from rjax.models import config_from_dict
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.programs.cache import keep_compiled

COLUMNS = {
    "batch": "requests",
    "prefix": "prefix",
    "own": "unique tokens",
    "plain_us": "plain, us",
    "relay_us": "relay, us",
    "speedup": "speed-up",
    "floor_us": "roofline, us",
    "plain_launched_us": "plain without graphs, us",
    "relay_launched_us": "relay without graphs, us",
    "plain_alone_us": "plain, single call, us",
    "relay_alone_us": "relay, single call, us",
    "plain_mib": "KV unshared, MiB",
    "relay_mib": "KV shared, MiB",
    "error": "relative error",
}
_DISTINCT_BYTES = 128 << 20  # KV read before the same pages are read again: more than any cache
_WITHOUT_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 30}  # longer than any chain of kernels


class Times(NamedTuple):
    """Seconds of a call: with graphs, without graphs (None on a CPU), and as a single call."""

    graph: float
    launched: float | None
    alone: float
    error: float


class Layer:
    """One attention layer on this machine's best backend."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.N, self.K = options.heads
        self.H = options.head_dim
        self.page_size = options.page_size
        device = jax.devices()[0]
        self.on_gpu = device.platform == "gpu"
        self.dtype = jnp.dtype(jnp.bfloat16 if self.on_gpu else jnp.float32)
        capability = getattr(device, "compute_capability", None)
        config = config_from_dict(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": self.N * self.H,
                "intermediate_size": self.N * self.H,
                "num_hidden_layers": 1,
                "num_attention_heads": self.N,
                "num_key_value_heads": self.K,
                "head_dim": self.H,
                "vocab_size": 128,
                "max_position_embeddings": 1 << 20,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "torch_dtype": self.dtype.name,
            }
        )
        self.backend: Backend = choose_backend(
            options.backend,
            platform=device.platform,
            compute_capability=None if capability is None else float(capability),
            model=config,
            dtype=self.dtype,
            page_size=self.page_size,
        )
        self.spec = AttentionSpec(scale=self.H**-0.5)

    def case(self, batch: int, prefix: int, own: int, *, share: bool) -> Case:
        tuning = self.backend.tuning
        fine = batch <= tuning.fine_rows
        split = max(self.page_size, tuning.fine_kv_split_size if fine else tuning.kv_split_size)
        return Case(
            f"{batch}; {prefix}; {own}",
            batch,
            prefix,
            own,
            N=self.N,
            K=self.K,
            H=self.H,
            S=self.page_size,
            share="on" if share else "off",
            tile_rows=tuning.tile_rows,
            split=split,
            split_policy=tuning.split_policy,
        )

    def times(self, case: Case) -> Times:
        """Seconds of a call, measured each way, and the relative error."""
        kv_bytes = case.bytes(self.dtype.itemsize)
        layers = max(1, min(8, math.ceil(_DISTINCT_BYTES / kv_bytes))) if self.on_gpu else 1
        inputs = make_inputs(case, 0, layers, self.dtype)
        prepare = jax.jit(self.backend.attention.prepare, static_argnums=2)
        plan = prepare(inputs.plan, inputs.positions, (self.N, self.K))
        attend = jax.jit(functools.partial(self.backend.attention.attention, spec=self.spec))
        args = (inputs.page_table, inputs.positions, plan)
        out, lse = attend(inputs.q, *inputs.pools[0], *args)
        relative, _ = errors(case, inputs, out, lse, self.spec)
        chain, given = self._chain(attend, inputs, args)
        graph = self._chained(chain.compile(), given)
        launched = self._chained(chain.compile(_WITHOUT_GRAPHS), given) if self.on_gpu else None
        return Times(graph, launched, self._alone(attend, inputs, args), relative)

    @property
    def _length(self) -> int:
        """Calls in a chain."""
        return 24 if self.on_gpu else 2

    def _chain(self, attend, inputs: Inputs, args) -> tuple[jax.stages.Lowered, list[jax.Array]]:
        """The chain lowered, and what it is called with."""
        # Flat, because a plan refuses the placeholders of the tracing API.
        leaves, tree = jax.tree.flatten((inputs.q, inputs.pools, args))

        @jax.jit
        def chain(*leaves):
            q, pools, args = jax.tree.unflatten(tree, leaves)
            # Each call's output is the next one's query: they run in order.
            for i in range(self._length):
                q, _ = attend(q, *pools[i % len(pools)], *args)
            return q

        return chain.lower(*leaves), leaves

    def _chained(self, compiled, given: list[jax.Array]) -> float:
        run = functools.partial(compiled, *given)
        return seconds_per_call(run, repeats=3, rounds=3) / self._length

    def _alone(self, one, inputs: Inputs, args) -> float:
        took = []
        for _ in range(20 if self.on_gpu else 3):
            start = time.perf_counter()
            jax.block_until_ready(one(inputs.q, *inputs.pools[0], *args))
            took.append(time.perf_counter() - start)
        return statistics.median(took)


def measure(layer: Layer, batch: int, prefix: int, own: int, ceilings: Ceilings) -> dict[str, Any]:
    """One point: plain and relay."""
    shared, unshared = (layer.case(batch, prefix, own, share=share) for share in (True, False))
    relay, plain = layer.times(shared), layer.times(unshared)
    token = 2 * layer.K * layer.H * layer.dtype.itemsize / 2**20
    return {
        "batch": batch,
        "prefix": prefix,
        "own": own,
        "plain_us": 1e6 * plain.graph,
        "relay_us": 1e6 * relay.graph,
        "speedup": plain.graph / relay.graph,
        "floor_us": 1e6 * ceilings.seconds(shared.bytes(layer.dtype.itemsize), shared.flops()),
        "plain_launched_us": None if plain.launched is None else 1e6 * plain.launched,
        "relay_launched_us": None if relay.launched is None else 1e6 * relay.launched,
        "plain_alone_us": 1e6 * plain.alone,
        "relay_alone_us": 1e6 * relay.alone,
        "plain_mib": token * batch * (prefix + own),
        "relay_mib": token * (prefix + batch * own),
        "error": max(relay.error, plain.error),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Time over prefix length at the most requests, relay and plain, for each own length."""
    rows = found["rows"]
    most = max(row["batch"] for row in rows)
    series = {}
    for own in sorted({row["own"] for row in rows}):
        here = [row for row in rows if row["batch"] == most and row["own"] == own]
        series[f"plain, own {own}"] = [(r["prefix"], r["plain_us"]) for r in here]
        series[f"relay, own {own}"] = [(r["prefix"], r["relay_us"]) for r in here]
    title = f"Attention of one layer, {most} requests, {found['environment']['device']}"
    lines(path, series, title=title, x="tokens of the shared prefix", y="microseconds", log="xy")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.attention", __doc__)
    p.add_argument("--batch", type=wholes(1), default=[1, 8, 32, 128], help="numbers of requests")
    p.add_argument(
        "--prefix", type=wholes(1), default=[64, 256, 1024, 4096, 16384], help="tokens all share"
    )
    p.add_argument(
        "--own", type=wholes(1), default=[128, 256], help="further tokens of each request"
    )
    p.add_argument("--heads", type=wholes(1, 2), default=[32, 8], help="query heads, KV heads")
    p.add_argument("--head-dim", type=whole(1), default=128, help="size of a head")
    p.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=64, help="prefixes are multiples of it"
    )
    p.add_argument("--backend", default="auto", help="auto, mosaic or xla")
    p.add_argument("--png", type=Path, help="file for the picture")
    add_time_limit(p)
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep, draw."""
    options = parser().parse_args(arguments)
    if any(prefix % options.page_size for prefix in options.prefix):
        raise SystemExit(f"prefix lengths must be multiples of the page size, {options.page_size}")
    keep_compiled(EngineConfig().compilation_cache_dir)
    layer, ceilings = Layer(options), measure_ceilings()
    # The largest batches first: the picture needs them if time runs out.
    batches = sorted(options.batch, reverse=True)
    points = [(b, s, o) for b in batches for o in options.own for s in options.prefix]
    found = record(
        "bench.attention",
        [],
        vars(options),
        backend=layer.backend.name,
        copy_bytes_per_s=ceilings.copy,
        matmul_flop_per_s=ceilings.matmul,
    )
    for point in in_time(points, options.seconds, desc="attention", quiet=options.quiet):
        found["rows"].append(measure(layer, *point, ceilings))
        save_part(found, options.json, "attention")
    keep(found, COLUMNS, options.json, "attention")
    if options.png is not None:
        draw(found, options.png)


if __name__ == "__main__":
    run("bench.attention", main)
