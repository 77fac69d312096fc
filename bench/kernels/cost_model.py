"""``python -m bench.kernels.cost_model``: fit the planner's cost model on this machine's GPU.

Times lists of equal items of several lengths and fits, by least squares, the time of an item as a
constant plus a part for each of its tokens; once for one-row items, once for wide ones.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import numpy as np

from bench.kernels.cases import Case
from bench.kernels.run_case import run_case
from bench.kernels.timing import copy_rate, matmul_rate
from pallas_kernels.attention import mosaic
from pallas_kernels.attention.planner import CostModel

_NARROW_LENGTHS = (128, 256, 512, 1024)
_WIDE_LENGTHS = (256, 512, 1024, 2048)


def fit(lengths: tuple[int, ...], seconds_per_item: list[float]) -> tuple[float, float]:
    """(constant, per token), both at least 0, weighted so that each length counts alike."""
    tokens, times = np.asarray(lengths, float), np.asarray(seconds_per_item)
    columns = np.stack([1 / times, tokens / times], axis=1)
    (constant, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if constant < 0:
        constant, slope = 0.0, float((tokens / times).sum() / ((tokens / times) ** 2).sum())
    return float(constant), float(slope)


def measure(N: int, K: int, H: int, S: int, tile_rows: int) -> CostModel:
    """Times in microseconds of the whole GPU; raises RuntimeError if a result is wrong."""
    rates = (copy_rate(), matmul_rate())
    pack = jax.jit(mosaic.pack_plan, static_argnums=2)

    def item_us(case: Case, items: int) -> float:
        result = run_case(case, mosaic.paged_attention, "cost model", rates, pack=pack)
        if not result.correct:
            raise RuntimeError(f"wrong result, so no cost model: {result.line()}")
        return result.us / items

    base = Case("narrow", 256, 0, 1, N=N, K=K, H=H, S=S, tile_rows=tile_rows, share="off")
    narrow = [
        item_us(dataclasses.replace(base, name=f"narrow {c}", own=c, split=c), base.batch)
        for c in _NARROW_LENGTHS
    ]
    # Every row of a shared beginning also has a token of its own, whose time is taken off.
    rows, cuts = 16 * tile_rows, 16
    alone = dataclasses.replace(base, name="one token", batch=rows, split=S)
    own_us = item_us(alone, 1)
    wide = []
    for c in _WIDE_LENGTHS:
        case = dataclasses.replace(alone, name=f"wide {c}", shared=cuts * c, split=c, share="on")
        wide.append((item_us(case, 1) - own_us) / (rows // tile_rows * cuts))
    narrow_item, narrow_token = fit(_NARROW_LENGTHS, narrow)
    wide_item, wide_token = fit(_WIDE_LENGTHS, wide)
    return CostModel(narrow_item, narrow_token, wide_item, wide_token)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.cost_model")
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar=("N", "K", "H"))
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON to write")
    options = parser.parse_args()
    N, K, H = options.heads
    model = measure(N, K, H, options.page_size, 128 // (N // K))
    record = {"device": jax.devices()[0].device_kind, "N": N, "K": K, "H": H}
    record |= {"S": options.page_size, "unit": "microseconds", **dataclasses.asdict(model)}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
