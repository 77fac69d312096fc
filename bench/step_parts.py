"""Where the time of decode steps goes: their kernels by kind, beside the floors of their stages."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from bench.ceilings import Ceilings
from bench.model_shapes import SHAPES
from bench.step_floor import DecodeCase, stages
from models import config_from_dict

COLUMNS: dict[str, str] = {
    "model": "model shapes",
    "batch": "rows",
    "shared": "shared tokens",
    "own": "own tokens",
    "busy": "all kernels, ms",
    "products": "products of the layers, ms",
    "products_floor": "their floor, ms",
    "attention": "attention and fusion, ms",
    "attention_floor": "their floor, ms",
    "logits": "logits, ms",
    "logits_floor": "their floor, ms",
    "norms": "norms, ms",
    "writes": "rotation and KV write, ms",
    "rest": "all else, ms",
}

_WITH_FLOORS = ("products", "attention", "logits")
_MEASURED = (*_WITH_FLOORS, "norms", "writes")
_KINDS = {
    "attention_kernel": "attention",
    "merge_kernel": "attention",
    "add_rms_norm_kernel": "norms",
    "rope_and_cache_kernel": "writes",
    "rotate_and_write_kernel": "writes",  # its name in results recorded before
}
# The last two are names in results recorded before.
_PRODUCTS = ("gemm", "nvjet", "cutlass", "split_product", "gated_product")
_STAGES = {
    "attention to the shared tokens": "attention",
    "attention to the own tokens": "attention",
    "logits": "logits",
}


def parts(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each profiled row of a result of ``bench.decode_step`` the milliseconds of each kind.

    A product that runs once is that of the logits. What is not among the row's longest kernels is
    "all else", as are activations that are kernels of their own. In steps of one row the products
    do fusion and most norms.
    """
    ceilings = Ceilings(found["copy_bytes_per_s"], found["matmul_flop_per_s"])
    return [_parts(row, ceilings) for row in found["rows"] if row["longest"]]


def _parts(row: Mapping[str, Any], ceilings: Ceilings) -> dict[str, Any]:
    config = config_from_dict(SHAPES[row["model"]])
    case = DecodeCase(row["batch"], row["shared"], row["own"])
    times: dict[str, float] = {kind: 0.0 for kind in _MEASURED}
    for kernel in row["longest"]:
        kind = _kind(kernel["name"], kernel["count"])
        if kind is not None:
            times[kind] += 1e3 * kernel["seconds"]
    floors: dict[str, float] = {f"{kind}_floor": 0.0 for kind in _WITH_FLOORS}
    for stage in stages(config, case, jnp.dtype(config.dtype).itemsize):
        floor = 1e3 * ceilings.seconds(stage.moved, stage.flops)
        floors[f"{_STAGES.get(stage.name, 'products')}_floor"] += floor
    rest = row["busy_ms"] - sum(times.values())
    named = {key: row[key] for key in ("model", "batch", "shared", "own")}
    return named | times | floors | {"busy": row["busy_ms"], "rest": rest}


def _kind(name: str, count: float) -> str | None:
    for start, kind in _KINDS.items():
        if name.startswith(start):
            return kind
    if any(part in name for part in _PRODUCTS):
        return "logits" if count == 1 else "products"
    return None
