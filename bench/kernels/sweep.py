"""Attention with and without relay over batch, prefix, unique tokens, heads and page size."""

import argparse
import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.ceilings import Ceilings, measure_ceilings
from bench.kernels.backends import Kernel, choose_kernel
from bench.kernels.cases.attention import Case
from bench.kernels.pool_runner import PoolRunner
from bench.kernels.result_file import ResultFile
from bench.kernels.run_table import reason

COLUMNS = {
    "batch": "B",
    "prefix": "prefix",
    "own": "unique tokens",
    "group": "G",
    "page_size": "S",
    "plain_us": "plain, us",
    "relay_us": "relay, us",
    "speedup": "speed-up",
    "floor_us": "roofline, us",
    "ratio": "relay / roofline",
    "error": "relative error",
    "failed": "error",
}
_MIN_SPLIT = 128
_FULL_ITEMS = 132  # work items that fill an H200
_MEMORY_SHARE = 0.4  # of the device, for KV


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """B sequences with ``prefix`` shared tokens and ``own`` unique tokens each."""

    batch: int
    prefix: int
    own: int = 128
    N: int = 32
    K: int = 8
    H: int = 128
    S: int = 64

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.N, self.K, self.H, self.S

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the distinct KV, in whole pages."""
        pages = self.prefix // self.S + self.batch * math.ceil(self.own / self.S)
        return 2 * itemsize * pages * self.S * self.K * self.H

    def case(self, kernel: Kernel, *, share: bool) -> Case:
        """The case with the KV split size that fills an H200 best."""
        tile_rows = kernel.tile_rows(self.N // self.K, self.H)
        if share and self.batch > 1 and self.prefix:
            tiles = math.ceil(self.batch / tile_rows) * self.K
            splits = max(4, round(_FULL_ITEMS / tiles))
            # A power of two, so that the prefix is whole splits.
            split = 1 << math.ceil(math.log2(max(_MIN_SPLIT, self.prefix / splits)))
            split = min(split, self.prefix)
        else:
            tiles = math.ceil(self.batch * self.K / 2)
            splits = max(1, round(2 * _FULL_ITEMS / tiles))
            page = max(self.S, 64)
            split = page * math.ceil(max(_MIN_SPLIT, (self.prefix + self.own) / splits) / page)
        return Case(
            f"{self.batch}; {self.prefix}; {self.own}",
            self.batch,
            self.prefix,
            self.own,
            N=self.N,
            K=self.K,
            H=self.H,
            S=self.S,
            share="on" if share else "off",
            tile_rows=tile_rows,
            split=split,
        )


def points() -> list[Point]:
    """A grid over batch and prefix, and lines along the other axes."""
    prefixes = (0, 128, 512, 2048, 8192, 32768, 131072)
    everything = [Point(b, p) for b in (1, 4, 16, 64, 256, 512) for p in prefixes]
    everything += [Point(64, p, own) for own in (16, 1024) for p in (512, 2048, 8192, 32768)]
    everything += [Point(b, p, K=k) for k in (32, 2) for b in (4, 64) for p in (512, 2048, 8192)]
    everything += [Point(64, p, S=s) for s in (16, 128) for p in (512, 8192)]
    return everything


def small_points() -> list[Point]:
    """Points that a CPU runs in seconds."""
    grid = [Point(b, p, 20, N=4, K=2, H=8, S=16) for b in (1, 4) for p in (0, 128, 256)]
    return [*grid, Point(4, 256, 40, N=4, K=1, H=8, S=16)]


def run_sweep(options: argparse.Namespace, results: ResultFile) -> int:
    """Run every point, grouped by heads; return how many failed or were wrong."""
    start = time.monotonic()
    kernel, ceilings = choose_kernel(options.backend), measure_ceilings()
    results.more |= {
        "backend": kernel.name,
        "copy_bytes_per_s": ceilings.copy,
        "matmul_flop_per_s": ceilings.matmul,
    }
    bad, late = 0, []
    wanted = _that_fit(small_points() if options.small else points(), kernel)
    for heads, _ in collections.Counter(p.heads for p in wanted).most_common():
        found = [p for p in wanted if p.heads == heads]
        try:
            runner = PoolRunner(kernel, list(_cases(found, kernel)))
        except Exception as error:
            print(f"{len(found)} points not run: {reason(error)}", flush=True)
            bad += len(found)
            continue
        for point in found:
            if time.monotonic() - start > options.seconds:
                late.append(point)
                continue
            row = _row(runner, point, kernel, ceilings)
            bad += "failed" in row
            print(_line(row), flush=True)
            results.add(row)
        del runner  # free its pool before the next one
    if late:
        print(f"{len(late)} points not run: {options.seconds:g} s were over (--seconds)")
    return bad + len(late)


def _that_fit(wanted: Sequence[Point], kernel: Kernel) -> list[Point]:
    memory = jax.devices()[0].memory_stats()
    room = _MEMORY_SHARE * memory["bytes_limit"] if memory else 1 << 28
    fit = [p for p in wanted if p.kv_bytes(kernel.dtype.itemsize) <= room]
    if len(fit) < len(wanted):
        print(f"{len(wanted) - len(fit)} points need more than {room / 2**30:.3g} GiB of KV: left")
    return fit


def _cases(found: Sequence[Point], kernel: Kernel) -> Iterable[Case]:
    for point in found:
        yield point.case(kernel, share=False)
        yield point.case(kernel, share=True)


def _row(runner: PoolRunner, point: Point, kernel: Kernel, ceilings: Ceilings) -> dict[str, Any]:
    row: dict[str, Any] = {
        "batch": point.batch,
        "prefix": point.prefix,
        "own": point.own,
        "group": point.N // point.K,
        "page_size": point.S,
    }
    relay, plain = (point.case(kernel, share=share) for share in (True, False))
    roofline = relay.roofline_us(ceilings, kernel.dtype.itemsize)
    row |= {"floor_us": roofline, "plain_cut": plain.split, "relay_cut": relay.split}
    try:
        plain_s, plain_error, _ = runner.measure(plain)
        relay_s, relay_error, _ = runner.measure(relay)
    except Exception as error:
        return row | {"failed": reason(error)}
    row["error"] = max(plain_error, relay_error)
    if not row["error"] < 1e-2:
        return row | {"failed": "wrong result"}
    times = {"plain_us": 1e6 * plain_s, "relay_us": 1e6 * relay_s, "speedup": plain_s / relay_s}
    return row | times | {"ratio": 1e6 * relay_s / roofline}


def _line(row: dict[str, Any]) -> str:
    name = "B {batch:4d}  prefix {prefix:6d}  own {own:5d}  G {group:2d}  S {page_size:3d}"
    text = name.format(**row)
    if "failed" in row:
        return f"{text}  {row['failed']}"
    return text + (
        f"  plain {row['plain_us']:9.1f} us  relay {row['relay_us']:9.1f} us"
        f"  x {row['speedup']:5.2f}  roofline {row['floor_us']:9.1f}  err {row['error']:.1e}"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the speed-up of relay over prefix length and batch."""
    from rjax.benchmarks.figures import cells

    rows = [row for row in found["rows"] if "speedup" in row]
    others = [(row["own"], row["group"], row["page_size"]) for row in rows]
    most = max(others, key=others.count)
    same = [row for row, other in zip(rows, others, strict=True) if other == most]
    values = {(row["prefix"], row["batch"]): row["speedup"] for row in same}
    title = (
        f"Plain time / relay time, {same[0]['own']} own tokens each, {found['backend']}, "
        f"{found['environment']['device']}"
    )
    cells(path, values, title=title, x="tokens of the shared prefix", y="sequences")
