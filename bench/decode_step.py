"""Device time of a whole decode step, compared with its roofline.

    python -m bench.decode_step                       # the table: H200, about three minutes
    python -m bench.decode_step --only qwen2.5-0.5b   # the rows of one model
    python -m bench.decode_step --growth              # 64 rows, a prefix growing to 32768 tokens
    python -m bench.decode_step --few-rows            # 8 and 16 rows, about two minutes
    python -m bench.decode_step --experts             # mixtures of experts, about five minutes
    python -m bench.decode_step --experts --only qwen3 --quantization fp8
    python -m bench.decode_step --experts --only gpt-oss --quantization mxfp4   # as published
    python -m bench.decode_step --max-model-len 131072   # steps for a long maximum sequence length
    python -m bench.decode_step --only qwen3 --num-decode-steps 8   # 8 steps as one program
    python -m bench.decode_step --tensor-parallel-size 2   # rows for several GPUs
    python -m bench.decode_step --model tiny --batch 4 --shared 64 --own 16   # any shape, any CPU

The step is the one the engine runs: embedding, layers, attention over pages, logits, sampling, KV
written in place. Weights are random. The roofline is the sum over the stages of the larger of bytes
at the copy rate and FLOP at the matmul rate, both measured in the same run. Weights and distinct KV
are counted once; everything but GEMMs and attention counts as free. On several GPUs it is that of
one's share, and sums over the devices count as free. Steps and rates are measured in short bursts.
"Sustained" is the time of a step in a continuous run, where a GPU at its power limit lowers its
clock.
"""

import argparse
import dataclasses
import functools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from tqdm import tqdm

from bench.ceilings import Ceilings, measure_ceilings
from bench.command_line import command_parser, keep, run, save_part
from bench.decode_rows import EXPERTS, FEW_ROWS, GROWTH, TABLE, Row, tensor_parallel
from bench.kernel_profile import kernel_times
from bench.kernels.timing import burst_seconds, seconds_per_call
from bench.step_roofline import DecodeCase, roofline_seconds
from rjax.batch.page_groups import one_group
from rjax.benchmarks.figures import lines
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.cli.values import whole
from rjax.config import PAGE_SIZES
from rjax.models import ModelConfig, config_from_dict, init_model
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD
from rjax.models.sharding import TENSOR_AXIS, parameter_sharding
from rjax.pallas_kernels.attention.plan.host import (
    Sharing,
    plan_attention,
)
from rjax.sampling import SamplerMode, init_state
from rjax.worker.backend import Backend, choose_backend
from rjax.worker.peer_memory import make_peer_memory
from rjax.worker.programs.cache import compiler_options
from rjax.worker.programs.keys import StepPrograms, multi_step_key, step_key
from rjax.worker.step.features import StepFeatures
from rjax.worker.step.input import GroupInput, StepInput
from rjax.worker.step.layout import PackedLayouts
from rjax.worker.step.result import StepResult
from rjax.worker.step.shape import StepShape
from rjax.worker.step.state import StepState

COLUMNS = {
    "model": "model shapes",
    "layers": "layers",
    "devices": "GPUs",
    "batch": "rows",
    "shared": "shared tokens",
    "own": "unique tokens",
    "relay": "relay",
    "weights": "weights",
    "step_ms": "step, ms",
    "sustained_ms": "sustained, ms",
    "floor_ms": "roofline, ms",
    "ratio": "step / roofline",
    "reach_ratio": "target / roofline",
    "reach_ms": "target, ms",
    "kernels": "kernels per step",
    "compile_s": "compile, s",
}


PEER_ROWS = 512  # rows whose shares fit the exchange buffers

_STARTED = re.compile(r" (?:fusion|custom-call|dot|copy|sort|scatter|gather|convolution)\(")


def step_shape(
    case: DecodeCase,
    backend: Backend,
    *,
    num_layers: int,
    page_size: int,
    relay: str,
    max_model_len: int | None = None,
) -> StepShape:
    """The step shape of a case, for a given maximum sequence length or the length of the case."""
    longest, rows = max_model_len or case.context, backend.padded_rows(case.batch)
    plan = backend.plan_shape(
        rows,
        case.batch,
        longest,
        page_size,
        coalesce=relay == "auto",
        unpadded_rows=case.batch,
    )
    groups = one_group(num_layers)
    return StepShape(rows, case.batch, -(-longest // page_size), page_size, groups, (plan,))


class Bench:
    """A model with random weights, and steps over it."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        backend: str,
        page_size: int,
        relay: str,
        mode: Any,
        dtype: str | None = None,
        quantization: str | None = None,
        max_model_len: int | None = None,
        devices: int = 1,
        num_decode_steps: int = 1,
        without: str | None = None,
    ) -> None:
        self.config: ModelConfig = with_quantization(config_from_dict(config), quantization)
        self.quantization = quantization
        self.max_model_len = max_model_len
        self.num_decode_steps = num_decode_steps
        self.page_size, self.relay = page_size, relay
        self.mode: SamplerMode = mode
        self.mesh = Mesh(np.array(jax.devices()[:devices]), (TENSOR_AXIS,))
        device = self.mesh.devices.flat[0]
        capability = getattr(device, "compute_capability", None)
        natural = self.config.dtype if device.platform == "gpu" else "float32"
        self.dtype = jnp.dtype(dtype or natural)
        self.backend: Backend = choose_backend(
            backend,
            platform=device.platform,
            compute_capability=None if capability is None else float(capability),
            model=self.config,
            dtype=self.dtype,
            page_size=page_size,
            devices=devices,
        )
        if without is not None:
            try:
                dispatcher = self.backend.dispatcher.without(without)
            except ValueError as error:
                raise SystemExit(f"--without: {error}") from None
            self.backend = dataclasses.replace(self.backend, dispatcher=dispatcher)
        peer_words = PEER_ROWS * self.config.hidden_size
        self.peer_memory, self.peers = None, None
        if self.backend.dispatcher.exchanges_shares:
            self.peer_memory, self.peers = make_peer_memory(self.mesh, peer_words)
        model = init_model(self.config, dtype=self.dtype, mesh=self.mesh)
        self.graph, weights = nnx.split(model)
        self.leaves, self.treedef = jax.tree.flatten(weights)

    def compiled(self, case: DecodeCase) -> tuple[Any, StepState, Array]:
        """The compiled program, a state with random KV, and the packed input of its steps."""
        shape = step_shape(
            case,
            self.backend,
            num_layers=self.config.num_layers,
            page_size=self.page_size,
            relay=self.relay,
            max_model_len=self.max_model_len,
        )
        features = StepFeatures(self.mode)
        several, model = self.num_decode_steps > 1, (self.graph, self.treedef)
        programs = StepPrograms(*model, self.backend, self.mesh, PackedLayouts())
        key = multi_step_key(shape, features) if several else step_key(shape)
        batch = self._input(case, shape)
        state = self._state(case.batch, int(batch.groups[0].pages[0].max()) + 1)
        packed = programs.layouts[shape].pack(batch)
        if several:
            packed = np.stack([packed] * self.num_decode_steps)
        packed = jax.device_put(packed, NamedSharding(self.mesh, PartitionSpec()))
        lowered = programs.get(key).lower(self.leaves, state, packed)
        options = compiler_options(self.leaves, self.mesh.devices.flat[0].platform)
        return lowered.compile(compiler_options=options), state, packed

    def _input(self, case: DecodeCase, shape: StepShape) -> StepInput:
        """Page tables: full pages of the shared tokens are in every table, the rest is unique."""
        B, S = case.batch, self.page_size
        common = case.shared // S
        own = -(-case.context // S) - common
        ids = np.random.default_rng(0).permutation(common + B * own).astype(np.int32)
        table = np.zeros((B, shape.table_pages), np.int32)
        table[:, :common] = ids[:common]
        table[:, common : common + own] = ids[common:].reshape(B, own)
        cost_model = self.backend.tuning.cost_model
        modes: dict[str, Sharing] = {"on": "on", "off": "off", "auto": cost_model}
        context = np.full(B, case.context, np.int32)
        plan, _ = plan_attention(
            table,
            np.arange(B + 1, dtype=np.int32),
            context,
            page_size=S,
            shape=shape.plans[0],
            sharing=modes[self.relay],
        )
        last, every = context - 1, np.arange(B, dtype=np.int32)
        padding = (0, shape.rows - B)
        kv_slots = np.pad(table[every, last // S] * S + last % S, padding, constant_values=-1)
        return StepInput(
            tokens=np.zeros(shape.rows, np.int32),
            token_slot=np.pad(every, padding, constant_values=-1),
            positions=np.pad(last, padding, constant_values=-1),
            groups=(GroupInput((kv_slots,), (table,), None, plan),),
            sample_row=every,
            slots=every,
            live=np.ones(B, np.int32),
            table_pages=shape.table_pages,
        )

    def _state(self, rows: int, pages: int) -> StepState:
        config, V = self.config, self.config.vocab_size
        shape = (pages, config.num_kv_heads, self.page_size, config.head_dim)
        sharding = parameter_sharding("P K S H", shape, self.mesh)
        normal = functools.partial(jax.random.normal, shape=shape, dtype=self.dtype)
        draw = jax.jit(normal, out_shardings=sharding)
        pools = [draw(key) for key in jax.random.split(jax.random.key(1), 2 * config.num_layers)]
        tokens = jax.random.randint(jax.random.key(2), (rows,), 0, V, jnp.int32)
        whole = NamedSharding(self.mesh, PartitionSpec())
        sampling, tokens = jax.device_put((init_state(rows, V), tokens), whole)
        L = config.num_layers
        return StepState(pools[:L], pools[L:], sampling, tokens, self.peers)

    def measure(self, row: Row, ceilings: Ceilings, profile: int = 0) -> dict[str, Any]:
        """Compile, run and time one row of the table; name its ``profile`` longest kernels."""
        case = row.case
        roofline = roofline_seconds(self.config, case, self.dtype, ceilings) / self.mesh.size
        start = time.perf_counter()
        compiled, state, packed = self.compiled(case)
        compile_s = time.perf_counter() - start
        box = [state]
        del state

        def run() -> Array:
            box[0], result = compiled(self.leaves, box[0], packed)
            return result.tokens if isinstance(result, StepResult) else result

        steps = self.num_decode_steps
        if jax.default_backend() == "gpu":
            repeats = max(2, min(40, round(0.02 / roofline / steps)))
            seconds, sustained = burst_seconds(run, repeats), seconds_per_call(run, 3 * repeats)
        else:  # which needs no rest
            seconds = sustained = seconds_per_call(run, repeats=2)
        seconds, sustained = seconds / steps, sustained / steps
        times, busy = kernel_times(run) if profile else ([], None)
        times = [each.of_one(steps) for each in times]
        self.peers = box[0].peers  # the steps donated what there was
        aimed = "H200" in self.mesh.devices.flat[0].device_kind  # which the targets are for
        return {
            "model": row.model,
            "layers": row.layers,
            "devices": None if self.mesh.size == 1 else self.mesh.size,
            "batch": case.batch,
            "shared": case.shared,
            "own": case.own,
            "relay": self.relay,
            "weights": self.quantization or self.dtype.name,
            "step_ms": 1e3 * seconds,
            "sustained_ms": 1e3 * sustained,
            "floor_ms": 1e3 * roofline,
            "ratio": seconds / roofline,
            "reach_ratio": row.target_ratio if aimed and self.quantization is None else None,
            "reach_ms": row.target(self.quantization) if aimed else None,
            "kernels": _kernels(compiled.as_text()),
            "compile_s": compile_s,
            "busy_ms": None if busy is None else 1e3 * busy / steps,
            "longest": [dataclasses.asdict(kernel) for kernel in times[:profile]],
            "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
        }


def _kernels(hlo: str) -> int:
    """Number of operations in the optimised program that start on the device; loops count once."""
    inside = set(re.findall(r"calls=(%[\w.-]+)", hlo))
    count, counted = 0, True
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0]
            counted = name not in inside
        elif counted:
            count += bool(_STARTED.search(line))
    return count


def measure_all(rows: tuple[Row, ...], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The record of the rows so far, after each; one model at a time in memory."""
    ceilings = measure_ceilings()
    found = []
    names = list(dict.fromkeys((row.model, row.layers) for row in rows))
    with tqdm(total=len(rows), desc="decode step", disable=options.quiet) as bar:
        for name, layers in names:
            changed = {} if layers is None else {"num_hidden_layers": layers}
            bench = Bench(
                SHAPES[name] | changed,
                backend=options.backend,
                page_size=options.page_size,
                relay=options.relay,
                mode=options.mode,
                quantization=options.quantization,
                max_model_len=options.max_model_len,
                devices=options.tensor_parallel_size,
                num_decode_steps=options.num_decode_steps,
                without=options.without,
            )
            for row in rows:
                if (row.model, row.layers) == (name, layers):
                    found.append(bench.measure(row, ceilings, options.profile))
                    bar.update()
                    yield record(
                        "bench.decode_step",
                        found,
                        vars(options),
                        backend=bench.backend.name,
                        copy_bytes_per_s=ceilings.copy,
                        matmul_flop_per_s=ceilings.matmul,
                    )
            del bench


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw step time and roofline over the length of the shared prefix."""
    rows = found["rows"]
    series = {
        name: [(row["shared"], row[key]) for row in rows]
        for name, key in (("step", "step_ms"), ("roofline", "floor_ms"))
    }
    title = f"{rows[0]['model']}, {rows[0]['batch']} rows, {found['environment']['device']}"
    lines(path, series, title=title, x="tokens of the shared prefix", y="ms a step")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.decode_step", __doc__)
    p.add_argument("--only", default="", help="rows of the table whose model name contains this")
    tables = p.add_mutually_exclusive_group()
    tables.add_argument("--growth", action="store_true", help="a growing prefix, not the table")
    tables.add_argument("--experts", action="store_true", help="mixtures of experts in its place")
    tables.add_argument("--few-rows", action="store_true", help="steps of 8 and 16 rows instead")
    p.add_argument("--model", choices=sorted(SHAPES), help="one row of your own, with the next 3")
    p.add_argument("--batch", type=whole(1), default=4, help="rows")
    p.add_argument("--shared", type=whole(0), default=64, help="tokens that all rows share")
    p.add_argument("--own", type=whole(1), default=16, help="further tokens of each row")
    p.add_argument("--relay", choices=("auto", "on", "off"), default="auto", help="shared reads")
    p.add_argument("--mode", choices=("greedy", "random", "full"), default="greedy", help="sampler")
    p.add_argument(
        "--quantization",
        choices=sorted(ON_LOAD),
        help="of the weights; mxfp4 is for experts",
    )
    p.add_argument("--backend", default="auto", help="auto, mosaic or xla")
    p.add_argument("--profile", type=whole(0), default=0, help="print so many kernels of each step")
    p.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens a page")
    p.add_argument(
        "--tensor-parallel-size",
        type=whole(1),
        default=1,
        help="devices; with more than one, the table is one for several GPUs",
    )
    p.add_argument(
        "--max-model-len", type=whole(1), help="most tokens of a sequence; default: of each row's"
    )
    p.add_argument(
        "--without",
        metavar="KERNEL",
        help="leave a kernel out, such as mosaic.one_row_layer, to see what it gains",
    )
    p.add_argument(
        "--num-decode-steps",
        type=whole(1),
        default=1,
        help="that run as one program; times are of one",
    )
    return p


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, keep."""
    options = parser().parse_args(arguments)
    devices = options.tensor_parallel_size
    if options.model is not None:
        case = DecodeCase(options.batch, options.shared, options.own)
        rows: tuple[Row, ...] = (Row(options.model, case),)
    else:
        table = tensor_parallel(devices) if devices > 1 else TABLE
        table = GROWTH if options.growth else EXPERTS if options.experts else table
        table = FEW_ROWS if options.few_rows else table
        rows = tuple(row for row in table if options.only in row.model)
    if devices > jax.device_count():
        raise SystemExit(
            f"--tensor-parallel-size is {devices}; this machine has {jax.device_count()} device(s)"
        )
    longest = max((row.case.context for row in rows), default=0)
    if options.max_model_len is not None and options.max_model_len < longest:
        raise SystemExit(
            f"--max-model-len is {options.max_model_len}; these rows have up to {longest} tokens"
        )
    if not rows:
        raise SystemExit(f"no row of the table has a model named like {options.only!r}")
    kind = "_growth" if options.growth else "_experts" if options.experts else ""
    kind = "_few_rows" if options.few_rows else kind
    name = f"decode_step{kind}"
    name += "" if devices == 1 else f"_tp{devices}"
    name += "" if options.quantization is None else f"_{options.quantization}"
    name += "" if options.max_model_len is None else "_long"
    name += "" if options.without is None else "_without"
    name += "_multi" if options.num_decode_steps > 1 else ""
    found: dict[str, Any] = {}
    for found in measure_all(rows, options):
        save_part(found, options.json, name)
    copy, matmul = found["copy_bytes_per_s"] / 1e12, found["matmul_flop_per_s"] / 1e12
    print(f"copy {copy:.3g} TB/s, bf16 {matmul:.3g} TFLOP/s")
    for row in found["rows"]:
        if row["longest"]:
            print(f"{row['model']}, {row['batch']} rows: {row['busy_ms']:.3f} ms busy")
        for kernel in row["longest"]:
            print(f"{1e6 * kernel['seconds']:9.1f} us {kernel['count']:6.1f} x {kernel['name']}")
    keep(found, COLUMNS, options.json, name)


if __name__ == "__main__":
    run("bench.decode_step", main)
