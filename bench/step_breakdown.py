"""Time of decode steps by kind of kernel, compared with the rooflines of their stages."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from bench.ceilings import Ceilings
from bench.step_roofline import DecodeCase, stages
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict

COLUMNS: dict[str, str] = {
    "model": "model shapes",
    "devices": "GPUs",
    "batch": "rows",
    "shared": "shared tokens",
    "own": "unique tokens",
    "busy": "all kernels, ms",
    "products": "GEMMs of the layers, ms",
    "products_floor": "roofline, ms",
    "attention": "attention and relay fusion, ms",
    "attention_floor": "roofline, ms",
    "logits": "logits, ms",
    "logits_floor": "roofline, ms",
    "norms": "norms, ms",
    "sums": "sums over GPUs with norms, ms",
    "writes": "RoPE and KV write, ms",
    "rest": "other, ms",
}

_WITH_ROOFLINE = ("products", "attention", "logits")
_MEASURED = (*_WITH_ROOFLINE, "norms", "sums", "writes")
_KINDS = {
    "attention_kernel": "attention",
    "merge_kernel": "attention",
    "add_rms_norm_kernel": "norms",
    "all_reduce_rms_norm_kernel": "sums",
    "all_reduce_kernel": "sums",
    "rope_and_cache_kernel": "writes",
    "rotate_and_write_kernel": "writes",  # its name in older results
}
# The last two are names in older results.
_GEMMS = ("gemm", "nvjet", "cutlass", "split_product", "gated_product")
_STAGES = {
    "attention to shared tokens": "attention",
    "attention to unique tokens": "attention",
    "logits": "logits",
}


def breakdown(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds of each kind of kernel, for each profiled row of a ``bench.decode_step`` result.

    A GEMM that runs once per step computes the logits. "Other" are kernels that are not among the
    longest of the row, and separate activation kernels. In steps of one row the GEMMs include
    relay fusion and most norms.
    """
    ceilings = Ceilings(found["copy_bytes_per_s"], found["matmul_flop_per_s"])
    return [_breakdown(row, ceilings) for row in found["rows"] if row["longest"]]


def _breakdown(row: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    layers, devices = row.get("layers"), row.get("devices") or 1
    changed = {} if layers is None else {"num_hidden_layers": layers}
    config = config_from_dict(SHAPES[row["model"]] | changed)
    case = DecodeCase(row["batch"], row["shared"], row["own"])
    times: dict[str, float] = {kind: 0.0 for kind in _MEASURED}
    for kernel in row["longest"]:
        kind = _kind(kernel["name"], kernel["count"])
        if kind is not None:
            times[kind] += 1e3 * kernel["seconds"]
    rooflines: dict[str, float] = {f"{kind}_floor": 0.0 for kind in _WITH_ROOFLINE}
    for stage in stages(config, case, jnp.dtype(config.dtype)):
        roofline = 1e3 * ceilings.seconds(stage.moved, stage.flops) / devices
        rooflines[f"{_STAGES.get(stage.name, 'products')}_floor"] += roofline
    rest = row["busy_ms"] - sum(times.values())
    named = {key: row.get(key) for key in ("model", "devices", "batch", "shared", "own")}
    return named | times | rooflines | {"busy": row["busy_ms"], "rest": rest}


def _kind(name: str, count: float) -> str | None:
    for start, kind in _KINDS.items():
        if name.startswith(start):
            return kind
    if any(gemm in name for gemm in _GEMMS):
        return "logits" if count == 1 else "products"
    return None
