"""The sum over devices, residual sum and RMSNorm: checked against float32, then timed.

Each row has the kernel beside XLA's collectives: one all-gather of the shares, added in the order
of the kernel, and ``psum``; both followed by the kernel that adds and norms.

XLA computes equal collectives of a chain of calls once. So a part of x is added to the first
summand of each device before them, which XLA fuses with the sum of a device's own summands.
"""

import argparse
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.kernels.cases.sums import SUM_TARGETS, SUMS
from bench.kernels.result_file import ResultFile
from bench.kernels.timing import burst_seconds
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.gemm.split_k_gemm import refusal, split_k_gemm
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual import add_rms_norm
from rjax.pallas_kernels.residual import all_reduce as mosaic
from rjax.pallas_kernels.residual import base as xla
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.peer_memory import PeerMemory

COLUMNS = {
    "case": "rows x columns",
    "devices": "GPUs",
    "summands": "summands of a GPU",
    "mosaic_us": "kernel, us",
    "target_us": "target, us",
    "gathered_us": "all-gather and norm, us",
    "psum_us": "psum and norm, us",
    "mosaic_error": "relative error of the kernel",
    "failed": "error",
}
_CALLS = 192  # of one dispatched run, so that it takes longer than its dispatch
_KERNELS = ("mosaic", "gathered", "psum")
_LARGEST_ERROR = 1e-2  # of a result in bfloat16
_PART = 2.0**-7  # of x that is added to the first summand
_EPS = 1e-5
_SHARES, _WHOLE = PartitionSpec(TENSOR_AXIS), PartitionSpec()


def run_sums(options: argparse.Namespace, results: ResultFile) -> int:
    """Run the cases on all devices; return how many failed or were wrong."""
    devices = jax.device_count()
    if devices < 2 or jax.default_backend() != "gpu":
        print("--sums needs several GPUs")
        return 1
    mesh = Mesh(np.array(jax.devices()), (TENSOR_AXIS,))
    memory, peers = PeerMemory.allocate(mesh, max(T * D for T, D, _ in SUMS))
    bad = 0
    cases = [case for case in SUMS if options.only in _name(case)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = {
            (case, kernel, calls): pool.submit(_compile, mesh, case, kernel, calls, peers)
            for case in cases
            for kernel in _KERNELS
            for calls in (1, _CALLS)
        }
    for case in cases:
        T, D, _ = case
        X = _summands(mesh, case)
        row: dict[str, Any] = {"case": _name(case), "devices": devices, "summands": X}
        row["target_us"] = SUM_TARGETS.get((devices, T, D))
        given = _draw(mesh, X, T, D)
        for kernel in _KERNELS:
            try:
                single, chain = (programs[case, kernel, n].result() for n in (1, _CALLS))
            except Exception as error:
                row["failed"] = f"{kernel}: {error}"
                print(row["failed"], flush=True)
                continue
            *found, peers = single(*given, peers)
            part = 0.0 if kernel == "mosaic" else mesh.size * _PART
            row[f"{kernel}_error"] = _error(found, given, part)
            box = [peers]

            def run(chain=chain, box=box, given=given) -> Any:
                *found, box[0] = chain(*given, box[0])
                return found

            row[f"{kernel}_us"] = 1e6 * burst_seconds(run, 4) / _CALLS
            peers = box[0]
        bad += row.get("mosaic_error", 1.0) > _LARGEST_ERROR or "failed" in row
        results.add(row)
        print(_line(row), flush=True)
    del memory  # not before the last program has ended
    return bad


def _name(case: tuple[int, int, int]) -> str:
    return f"{case[0]} x {case[1]}"


def _compile(mesh: Mesh, case: tuple[int, int, int], kernel: str, calls: int, peers: Peers) -> Any:
    T, D, _ = case
    shapes = (
        (((T, D), jnp.bfloat16), _WHOLE),
        (((mesh.size * _summands(mesh, case), T, D), jnp.float32), _SHARES),
        (((D,), jnp.bfloat16), _WHOLE),
    )
    given = [
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec)) for shape, spec in shapes
    ]
    return _program(mesh, kernel, calls).lower(*given, peers).compile()


def _summands(mesh: Mesh, case: tuple[int, int, int]) -> int:
    """Split-K partials of a device's projection."""
    T, D, depth = case
    depth //= mesh.size
    if refusal(T, depth, D, jnp.bfloat16) is not None:
        return 1
    h, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, depth), (depth, D)))
    return len(jax.eval_shape(split_k_gemm, h, w).summands)


def _draw(mesh: Mesh, X: int, T: int, D: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(T), 3)
    arrays = (
        (jax.random.normal(keys[0], (T, D)).astype(jnp.bfloat16), _WHOLE),
        (jax.random.normal(keys[1], (mesh.size * X, T, D)), _SHARES),
        (jax.random.normal(keys[2], (D,)).astype(jnp.bfloat16), _WHOLE),
    )
    return tuple(jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in arrays)


def _program(mesh: Mesh, kernel: str, calls: int) -> Any:
    """(x, summands, weight, peers) to (x, norm, peers), repeated over the residual stream."""

    @jax.jit  # lowered once
    def once(x: Any, summands: Any, weight: Any, peers: Peers) -> Any:
        if kernel == "mosaic":
            update = Partial(summands, dtype=x.dtype)
            return mosaic.all_reduce_rms_norm(x, update, weight, _EPS, peers)
        summands = summands.at[0].add(_PART * x.astype(jnp.float32))
        update = Partial(summands, dtype=x.dtype)
        if kernel == "gathered":
            total = xla.all_reduce(update, TENSOR_AXIS)
        else:
            total = lax.psum(summands.sum(0), TENSOR_AXIS).astype(x.dtype)
        return *add_rms_norm.add_rms_norm(x, total, weight, _EPS), peers

    def local(x: Any, summands: Any, weight: Any, peers: Peers) -> Any:
        h = x
        for _ in range(calls):
            x, h, peers = once(x, summands, weight, peers)
        return x[None], h[None], peers

    @functools.partial(jax.jit, donate_argnums=3)
    def run(x: Any, summands: Any, weight: Any, peers: Peers) -> Any:
        specs = Peers(_SHARES, _SHARES, peers.capacity)  # type: ignore[arg-type]
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(_WHOLE, _SHARES, _WHOLE, specs),
            out_specs=(_SHARES, _SHARES, specs),
            check_vma=False,
        )(x, summands, weight, peers)

    return run


def _error(found: Any, given: tuple[Any, ...], part: float) -> float:
    """Largest relative error of a device's results against float64; infinite if devices differ.

    ``part`` of x was added to the sum.
    """
    x, summands, weight = given
    residual, normed = (np.asarray(array, np.float64) for array in found)
    if any((array != array[:1]).any() for array in (residual, normed)):
        return float("inf")
    want = (1 + part) * np.asarray(x, np.float64) + np.asarray(summands, np.float64).sum(0)
    norm = want / np.sqrt((want**2).mean(-1, keepdims=True) + _EPS) * np.asarray(weight, np.float64)
    pairs = ((residual[0], want), (normed[0], norm))
    return max(float(np.abs(got - right).max() / np.abs(right).max()) for got, right in pairs)


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['case']:>10s} X={row['summands']}"]
    for kernel in _KERNELS:
        us, error = row.get(f"{kernel}_us"), row.get(f"{kernel}_error")
        parts.append(
            f"{kernel} " + ("failed" if us is None else f"{us:7.2f} us, error {error:.1e}")
        )
    return "; ".join(parts)
