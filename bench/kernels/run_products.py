"""The GEMMs of few rows: checked against float32, then timed beside the copy rate."""

import argparse
import dataclasses
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.ceilings import Ceilings, measure_ceilings
from bench.kernels.cases.products import (
    ProductCase,
    distinct_weights,
    product_cases,
    small_product_cases,
)
from bench.kernels.check import UNTUNED
from bench.kernels.program import Program
from bench.kernels.result_file import ResultFile
from bench.kernels.run_case import CACHE_BYTES
from bench.kernels.run_table import reason
from bench.kernels.timing import burst_seconds

COLUMNS = {
    "case": "case",
    "config": "tiles",
    "us": "us",
    "bytes_per_s": "bytes/s",
    "of_copy": "part of the copy rate",
    "relative_error": "relative error",
    "failed": "error",
}
_CHAIN_US = 600  # minimum device time of one dispatched run
_LARGEST_ERROR = 5e-3  # of a result in bfloat16; fp8 wgmma keeps about 14 bits of 128 products
_SERIAL = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


@dataclasses.dataclass(frozen=True, slots=True)
class _Ready:
    case: ProductCase
    chain: Program
    judge: Program
    draw_rows: Program
    draw_weight: Program
    weights: int
    length: int


def run_products(options: argparse.Namespace, results: ResultFile) -> int:
    """Run the cases selected by ``options.only``; return how many failed or were wrong."""
    start, ceilings = time.monotonic(), measure_ceilings()
    results.more |= {"copy_bytes_per_s": ceilings.copy, "matmul_flop_per_s": ceilings.matmul}
    print(f"copy {ceilings.copy / 1e12:.3g} TB/s")
    plain = options.backend == "xla" or jax.default_backend() == "cpu"
    cases = small_product_cases() if options.small else product_cases()
    cases = [case for case in cases if _selected(options.only, case.name)]
    if options.tune:
        cases = [each for case in cases for each in case.configs(options.tune)]
    bad, ready = 0, []
    for case in cases:
        try:
            ready.append(_lower(case, plain, ceilings))
        except Exception as error:
            bad += _failed(case, error, results)
    print(f"lowered {len(ready)} cases in {time.monotonic() - start:.0f} s", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = [pool.submit(_compile, one) for one in ready]
        # Compiling uses all cores and would disturb the times.
        errors = [future.exception() for future in compiling]
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    for one, error in zip(ready, errors, strict=True):
        if time.monotonic() - start > options.seconds:
            print(f"{one.case.name:44s} not run: {options.seconds:g} s were over (--seconds)")
            bad += 1
            continue
        try:
            if error is not None:
                raise error
            row = _run(one, ceilings)
        except Exception as caught:
            bad += _failed(one.case, caught, results)
            continue
        bad += "failed" in row
        results.add(row)
        print(_line(row), flush=True)
    return bad


def _selected(only: str, name: str) -> bool:
    """Whether the name has all comma-separated parts of ``only``."""
    return all(part.strip() in name for part in only.split(","))


def _lower(case: ProductCase, plain: bool, ceilings: Ceilings) -> _Ready:
    weights = 1 if jax.default_backend() == "cpu" else distinct_weights(case, CACHE_BYTES)
    floor_us = 1e6 * case.weight_bytes / ceilings.copy
    length = max(weights, min(128, math.ceil(_CHAIN_US / max(floor_us, 3))))
    multiply = jax.jit(case.plain if plain else case.mosaic)  # lowered once

    def chain(h: Any, weights_: Any) -> Any:
        found = []
        for i in range(length):
            found.append(multiply(h, weights_[i % weights]))
            h, found[-1] = lax.optimization_barrier((h, found[-1]))  # in order
        return found

    def judge(first: Any, again: Any, h: Any, weight: Any) -> Any:
        want = case.plain(h, weight)
        got = first.astype(jnp.float32)
        if got.ndim == 3:
            got, want = got.sum(0), want.sum(0)
        error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        return error, (first == again).all()

    key = jax.random.key(0)
    h, weight = jax.eval_shape(case.draw_rows, key), jax.eval_shape(case.draw_weight, key)
    serial = _SERIAL if jax.default_backend() == "gpu" else {}
    chained = Program(chain, h, [weight] * weights, compiler_options=serial)
    one = chained.leaves[0]
    return _Ready(
        case,
        chained,
        Program(judge, one, one, h, weight, compiler_options=UNTUNED),
        Program(case.draw_rows, key, compiler_options=UNTUNED),
        Program(case.draw_weight, key, compiler_options=UNTUNED),
        weights,
        length,
    )


def _compile(ready: _Ready) -> None:
    for program in (ready.draw_rows, ready.draw_weight, ready.judge, ready.chain):
        program.compile()


def _run(ready: _Ready, ceilings: Ceilings) -> dict[str, Any]:
    case = ready.case
    key, *keys = jax.random.split(jax.random.key(0), 1 + ready.weights)
    h, weights = ready.draw_rows(key), [ready.draw_weight(each) for each in keys]
    run = ready.chain.bound(h, weights)
    first, again = run()[0], run()[0]
    error, same = (x.item() for x in ready.judge(first, again, h, weights[0]))
    row: dict[str, Any] = {
        "case": case.name,
        "layer": case.layer,
        "scheme": case.scheme,
        "rows": case.rows,
        "config": "" if case.config is None else _tiles(case),
        "relative_error": error,
        "us": None,
        "bytes_per_s": None,
        "of_copy": None,
    }
    if not (error < _LARGEST_ERROR and same):
        return row | {"failed": "wrong result" if same else "two runs differ"}
    seconds = burst_seconds(run) / ready.length
    rate = case.weight_bytes / seconds
    return row | {"us": 1e6 * seconds, "bytes_per_s": rate, "of_copy": rate / ceilings.copy}


def _tiles(case: ProductCase) -> str:
    config = case.config
    assert config is not None
    return (
        f"{config.consumers} x 64 x {config.block_k}, {config.split_k} splits, "
        f"{config.num_stages} stages"
    )


def _failed(case: ProductCase, error: BaseException, results: ResultFile) -> int:
    text = reason(error) if isinstance(error, Exception) else repr(error)
    results.add({"case": case.name, "failed": text})
    print(f"{case.name:44s} did not run: {text}", flush=True)
    return 1


def _line(row: dict[str, Any]) -> str:
    if row["us"] is None:
        return f"{row['case']:44s} {row['failed']}: error {row['relative_error']:.1e}"
    return (
        f"{row['case']:44s} {row['us']:8.2f} us {row['bytes_per_s'] / 1e12:6.2f} TB/s "
        f"{row['of_copy']:5.2f} of copy  err {row['relative_error']:.1e}  {row['config']}"
    )
