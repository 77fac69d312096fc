"""The experts of a layer: our grouped GEMM beside those of JAX and torch, checked, then timed.

Each time is of both products and the activation between them. "whole" is what a step runs: with the
work list, the gathered rows and the sum. Routing is uniform, a different one for each call. Weights
in few bits have no peers here; the reference is their dequantised weight. tokamax's product is a
peer where tokamax can be imported.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.ceilings import Ceilings, measure_ceilings
from bench.kernels.cases.experts import SCHEMES, ExpertsCase, expert_cases
from bench.kernels.result_file import ResultFile
from bench.kernels.run_table import reason
from bench.kernels.timing import burst_seconds
from rjax.pallas_kernels.experts import base, grouped_gemm
from rjax.pallas_kernels.experts.config import choose_tile_rows
from rjax.pallas_kernels.experts.grouped_weight import grouped_weight
from rjax.pallas_kernels.experts.work_list import WorkList, make_work_list
from rjax.pallas_kernels.gemm.activation import Activation

COLUMNS = {
    "case": "case",
    "floor_us": "roofline, us",
    "whole_us": "rjax, whole, us",
    "products_us": "rjax, products, us",
    "of_copy": "products, part of the copy rate",
    "of_matmul": "products, part of the matmul rate",
    "plain_us": "rjax in plain JAX, whole",
    "ragged_dot_us": "jax.lax.ragged_dot",
    "tokamax_us": "tokamax.ragged_dot, mosaic",
    "torch_us": "torch._grouped_mm",
    "relative_error": "relative error",
}
_CALLS = 8  # with different routings, in one program
_FEW_ROWS, _MANY_CALLS = 8, 64  # so that the program takes longer than its dispatch
_LARGEST_ERROR = 1e-2  # of a result in bfloat16
_MOST_BYTES = 32 << 30  # that ragged_dot may need for its expanded rows
_SCRIPT = Path(__file__).parent / "peers" / "torch_experts.py"
_SWIGLU = Activation("silu", gated=True)


def run_experts(options: argparse.Namespace, results: ResultFile) -> int:
    """Run the cases whose name contains ``options.only``; return how many of ours failed."""
    quantization = options.quantization
    cases = expert_cases(small=options.small, quantization=quantization)
    cases = [case for case in cases if options.only in case.name]
    plain = quantization is None
    start = time.monotonic()
    torch_us = _torch(cases, options.torch_python, options.seconds / 2) if plain else {}
    ceilings = measure_ceilings()
    results.more |= {"copy_bytes_per_s": ceilings.copy, "matmul_flop_per_s": ceilings.matmul}
    bad = 0
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "torch_us": torch_us.get(case.name)}
        if time.monotonic() - start > options.seconds:
            print(f"{case.name}: not run, {options.seconds:g} s were over (--seconds)")
            bad += 1
            continue
        try:
            row |= _run(case, ceilings)
        except Exception as error:
            row["failed"] = reason(error)
        bad += "failed" in row
        results.add(row)
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        print(shown, flush=True)
    return bad


def _run(case: ExpertsCase, ceilings: Ceilings) -> dict[str, Any]:
    J, X, D, width = case.shape
    keys = jax.random.split(jax.random.key(0), 4)
    h = jax.random.normal(keys[0], (case.rows, D), jnp.bfloat16)
    up: Any
    down: Any
    if case.quantization is None:
        up = D**-0.5 * jax.random.normal(keys[1], (J, D, 2, width), jnp.bfloat16)
        down = width**-0.5 * jax.random.normal(keys[2], (J, width, D), jnp.bfloat16)
    else:
        up, down = map(_random_leaves, keys[1:3], case.leaves())
    weights = jax.random.uniform(keys[3], (case.rows, X))
    calls = _MANY_CALLS if case.rows < _FEW_ROWS else _CALLS
    routings = case.routings(calls)
    reference = jax.jit(functools.partial(_plain, case))
    want = np.asarray(reference(h, jnp.asarray(routings[0]), weights, up, down), np.float32)
    floor = ceilings.seconds(sum(map(case.moved, routings)) / calls, case.flops)
    row: dict[str, Any] = {"floor_us": 1e6 * floor}
    for name, call, prepare in _ways(case):
        prepared = [jax.jit(prepare)(h, jnp.asarray(each)) for each in routings]
        try:
            out = jax.jit(call)(prepared[0], weights, up, down)
            error = float(np.linalg.norm(np.asarray(out, np.float32) - want))
            error /= float(np.linalg.norm(want))
            if not error < _LARGEST_ERROR:
                raise ValueError(f"wrong result, relative error {error:.1e}")

            @jax.jit
            def chain(prepared, weights, up, down, call=call):
                found = []
                for each in prepared:
                    found.append(call(each, weights, up, down))
                    weights, found[-1] = lax.optimization_barrier((weights, found[-1]))  # in order
                return found

            seconds = burst_seconds(functools.partial(chain, prepared, weights, up, down))
            row[f"{name}_us"] = 1e6 * seconds / calls
            print(f"{case.name}: {name} {row[f'{name}_us']:.4g} us", flush=True)
        except Exception as failure:
            if name in ("whole", "products"):
                raise
            print(f"{case.name}: {name}: {reason(failure)}", flush=True)
            continue
        if name == "whole":
            row["relative_error"] = error
    taken = 1e-6 * row.get("products_us", math.inf)
    row["of_copy"] = sum(map(case.moved, routings)) / calls / taken / ceilings.copy
    row["of_matmul"] = case.flops / taken / ceilings.matmul
    return row


def _random_leaves(key: jax.Array, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Random values, and scales for results of about the size of the rows."""
    weight, scale = shapes["weight"], shapes["weight_scale"]
    size = weight.shape[-1] ** -0.5
    if weight.dtype == jnp.float8_e4m3fn:
        values = jax.random.normal(key, weight.shape, jnp.bfloat16).astype(weight.dtype)
    else:
        limits = jnp.iinfo(weight.dtype)
        values = jax.random.randint(key, weight.shape, limits.min, limits.max + 1, jnp.int8)
        values = values.astype(weight.dtype)
        size /= limits.max / 2
    draw = jax.random.uniform(key, scale.shape, minval=0.5 * size, maxval=1.5 * size)
    if scale.dtype == jnp.uint8:
        draw = jnp.round(127 + jnp.log2(draw))
    return {"weight": values, "weight_scale": draw.astype(scale.dtype)}


def _plain(case: ExpertsCase, h: Any, chosen: Any, weights: Any, up: Any, down: Any) -> jax.Array:
    run = functools.partial(base.experts, h, chosen, weights, up, down, _SWIGLU)
    if case.quantization is None:
        return run().reduce()
    _, _, D, width = case.shape
    dequantise = SCHEMES[case.quantization].for_experts.dequantise
    return run(
        widen_up=lambda leaves: dequantise(leaves, D, h.dtype).reshape(D, 2, width),
        widen_down=lambda leaves: dequantise(leaves, width, h.dtype),
    ).reduce()


def _operands(case: ExpertsCase, up: Any, down: Any) -> tuple[Any, Any]:
    """The weights as the kernels take them."""
    if case.quantization is None:
        return up, down
    scheme = SCHEMES[case.quantization]
    return grouped_weight(scheme.values, up, 2), grouped_weight(scheme.values, down, 1)


def _ways(case: ExpertsCase) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(name, (prepared, weights, up, down) to the result, (h, routing) to what is prepared)."""
    J, X, D, width = case.shape

    def both(h: Any, chosen: Any) -> Any:
        return h, chosen

    def whole(prepared: Any, weights: Any, up: Any, down: Any) -> Any:
        h, chosen = prepared
        of_up, of_down = _operands(case, up, down)
        return grouped_gemm.experts(h, chosen, weights, of_up, of_down).reduce()

    def products(prepared: Any, weights: Any, up: Any, down: Any) -> Any:
        of_up, of_down = _operands(case, up, down)
        return _products(prepared, weights, of_up, of_down)

    if jax.default_backend() == "gpu":  # where plain JAX takes longer than all others together
        promoted = case.quantization == "fp8-block"
        yield "whole", whole, both
        yield "products", products, _listed(J, width, promoted)
    else:
        yield "plain", lambda p, *arrays: _plain(case, *p, *arrays), both
    if case.quantization is not None:
        return
    if 2 * case.rows * X * J * D > _MOST_BYTES:
        print(f"{case.name}: ragged_dot: it expands each row to every expert")
    else:
        yield "ragged_dot", _ragged, _sorted(J)
    if importlib.util.find_spec("tokamax") is not None:
        dot = functools.partial(
            importlib.import_module("tokamax").ragged_dot, implementation="mosaic"
        )
        yield "tokamax", functools.partial(_ragged, dot=dot), _sorted(J)


def _listed(num_experts: int, width: int, promoted: bool) -> Callable[..., Any]:
    def prepare(h: Any, chosen: Any) -> Any:
        rows = choose_tile_rows(chosen.size, num_experts, width, promoted=promoted)
        work = make_work_list(chosen, num_experts, rows)
        return (h if len(h) == 1 else h[work.slot_row]), work

    return prepare


def _products(prepared: tuple[Any, WorkList], weights: Any, up: Any, down: Any) -> Any:
    rows, work = prepared
    hidden = grouped_gemm.gate_up(rows, up, work)
    return grouped_gemm.weighted_down(hidden, down, weights, work).sum(0)


def _sorted(num_experts: int) -> Callable[..., Any]:
    def prepare(h: Any, chosen: Any) -> Any:
        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=num_experts)
        return h[order // chosen.shape[1]], sizes, jnp.argsort(order)

    return prepare


def _ragged(
    prepared: Any, weights: Any, up: Any, down: Any, dot: Callable[..., Any] = lax.ragged_dot
) -> Any:
    rows, sizes, back = prepared
    J, D, _, width = up.shape
    both = dot(rows, up.reshape(J, D, 2 * width), sizes)
    hidden = jax.nn.silu(both[:, :width]) * both[:, width:]
    out = dot(hidden, down, sizes)[back].reshape(*weights.shape, D)
    return (out.astype(jnp.float32) * weights[..., None]).sum(1)


def _torch(cases: list[ExpertsCase], python: str, seconds: float) -> dict[str, float]:
    """Times of torch in a process of its own, before this one allocates device memory."""
    with tempfile.TemporaryDirectory() as scratch:
        task = Path(scratch) / "task.json"
        task.write_text(json.dumps([[c.name, *c.shape, c.rows] for c in cases]))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        try:
            done = subprocess.run(
                [python, str(_SCRIPT), str(task)],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"torch's process: {type(error).__name__}")
            return {}
    found = {}
    for line in done.stdout.splitlines():
        name, us, failed = json.loads(line)
        if failed:
            print(f"{name}: torch: {failed}")
        else:
            found[name] = us
    if done.returncode:
        print(f"torch's process ended with {done.returncode}")
    return found
