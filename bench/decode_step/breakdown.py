"""Time of decode steps by kind of kernel, compared with the rooflines of their stages."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from bench.ceilings import Ceilings
from bench.decode_step.roofline import DecodeCase, stages
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict
from rjax.models.loading.config import with_quantization
from rjax.models.schemes import ON_LOAD

COLUMNS: dict[str, str] = {
    "model": "model shapes",
    "devices": "GPUs",
    "batch": "rows",
    "shared": "shared tokens",
    "own": "unique tokens",
    "busy": "all kernels, ms",
    "layers": "whole layers, ms",
    "layers_floor": "roofline, ms",
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
_MEASURED = ("layers", *_WITH_ROOFLINE, "norms", "sums", "writes")
_IN_LAYERS = ("products", "attention", "norms", "writes")
_COVERED = 0.96  # of the time of all kernels; with less, a kind may be missing
_KINDS = {
    "one_row_layer": "layers",
    "post_attention_block": "products",
    "between_attention": "products",  # its name in older results
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
    """Milliseconds of each kind of kernel, for rows of a ``bench.decode_step`` result.

    Rows are those whose longest kernels, as many as were profiled, take nearly all of the time. A
    GEMM that runs once per step computes the logits. "Other" are kernels that are not among the
    longest of the row, and separate activation kernels. In steps of one row the GEMMs include
    relay fusion and most norms, and a whole layer all that a layer has; in those of 8 and 16 rows
    the GEMMs include norms.
    """
    ceilings = Ceilings(found["copy_bytes_per_s"], found["matmul_flop_per_s"])
    return [_breakdown(row, ceilings) for row in found["rows"] if is_covered(row)]


def is_covered(row: Mapping[str, Any]) -> bool:
    """Whether few kernels of a row are unknown."""
    known = sum(kernel["seconds"] for kernel in row["longest"])
    return bool(row["longest"]) and 1e3 * known >= _COVERED * row["busy_ms"]


def _breakdown(row: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    layers, devices = row.get("layers"), row.get("devices") or 1
    changed = {} if layers is None else {"num_hidden_layers": layers}
    config = config_from_dict(SHAPES[row["model"]] | changed)
    if row.get("weights") in ON_LOAD:
        config = with_quantization(config, row["weights"])
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
    if times["layers"]:
        rooflines["layers_floor"] = rooflines["products_floor"] + rooflines["attention_floor"]
        times = {kind: time for kind, time in times.items() if time or kind not in _IN_LAYERS}
        rooflines = {key: rooflines[key] for key in ("layers_floor", "logits_floor")}
    else:
        del times["layers"]
    named = {key: row.get(key) for key in ("model", "devices", "batch", "shared", "own")}
    return named | times | rooflines | {"busy": row["busy_ms"], "rest": rest}


def _kind(name: str, count: float) -> str | None:
    for start, kind in _KINDS.items():
        if name.startswith(start):
            return kind
    if any(gemm in name for gemm in _GEMMS):
        return "logits" if count == 1 else "products"
    return None
