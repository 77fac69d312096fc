"""Fits the cost model by which engines decide about relay, on the device of this machine.

    python -m bench.kernels.cost_model                       # for 32 query heads, 8 KV heads of 128
    python -m bench.kernels.cost_model --heads 14,2,64 --page-size 32

Times batches with a shared prefix, with and without relay, and fits by least squares the costs of a
single-row and of a multi-row item: a constant and a cost per token. A quarter of the measurements
is held out to measure the error. The fit is saved in the user's cache folder, where every engine
with these heads on such a device finds it; running this again replaces it.
"""

import argparse
import dataclasses
import datetime
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from bench import RESULTS
from bench.command_line import command_parser, run
from bench.kernels.backends import NAMES, Kernel, choose_kernel
from bench.kernels.cases.attention import Case
from bench.kernels.pool_runner import PoolRunner
from rjax.benchmarks.records import record, save
from rjax.cli.values import wholes
from rjax.config import PAGE_SIZES
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.worker.cost_model import Fitted, keep_cost_model

COLUMNS = {
    "device": "device",
    "backend": "attention",
    "N": "N",
    "K": "K",
    "H": "H",
    "dtype": "KV",
    "single_row_item": "single-row item, us",
    "single_row_token": "per token, us",
    "multi_row_item": "multi-row item, us",
    "multi_row_token": "per token, us",
    # The names of these costs in older results.
    "narrow_item": "single-row item, us",
    "narrow_token": "per token, us",
    "wide_item": "multi-row item, us",
    "wide_token": "per token, us",
    "mean_error": "mean error, held out",
    "worst_error": "largest error",
    "right": "right decisions",
    "decisions": "of",
}
type Pair = tuple[Case, Case]
type Measure = Callable[[Case], tuple[float, AttentionPlan]]
_HELD_OUT = 4  # every fourth pair
_CLEAR = 1.03  # a ratio of times above noise


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and its error on held-out cases.

    Attributes:
        model: costs in microseconds of the whole device.
        launch_us: constant cost of a call.
        mean_error, worst_error: of the time of a held-out case, relative.
        decisions, right: held-out pairs that clearly differ, and those that the model predicts.
    """

    model: CostModel
    launch_us: float
    mean_error: float
    worst_error: float
    decisions: int
    right: int


def pairs(N: int, K: int, H: int, S: int, tile_rows: int, *, small: bool) -> list[Pair]:
    """(shared, not shared) cases for several batch sizes and KV split sizes.

    There are many splits, so that the device is full and an item costs its fraction of it.
    """
    batches, splits = ((2, 8), 3) if small else ((2, 8, 32, 128), 32)
    lengths = (S, 2 * S, 4 * S, 8 * S) if small else (128, 256, 512, 1024, 2048)
    found = []
    for rows in batches:
        for length in lengths:
            shared = Case(
                f"{rows} rows, {length} tokens",
                rows,
                splits * length,
                1,
                N=N,
                K=K,
                H=H,
                S=S,
                tile_rows=tile_rows,
                split=length,
            )
            found.append((shared, dataclasses.replace(shared, share="off")))
    return found


def fit(cases: Sequence[Pair], measure: Measure) -> Fit:
    """Measure all cases, fit to most of them, and evaluate on the rest.

    Args:
        cases: pairs of shared and not shared.
        measure: case to its seconds and plan.
    """
    found = [[measure(case) for case in pair] for pair in cases]
    us = np.array([[1e6 * seconds for seconds, _ in pair] for pair in found])
    counts = np.array([[item_counts(plan) for _, plan in pair] for pair in found])
    held_out = np.arange(len(cases)) % _HELD_OUT == _HELD_OUT - 1
    costs = non_negative(counts[~held_out].reshape(-1, 5), us[~held_out].ravel())
    predicted = counts[held_out] @ costs
    error = np.abs(predicted / us[held_out] - 1)
    ratio = us[held_out, 1] / us[held_out, 0]
    clear = np.maximum(ratio, 1 / ratio) > _CLEAR
    right = (predicted[:, 1] > predicted[:, 0]) == (ratio > 1)
    return Fit(
        model=CostModel(*(float(cost) for cost in costs[1:])),
        launch_us=float(costs[0]),
        mean_error=float(error.mean()),
        worst_error=float(error.max()),
        decisions=int(clear.sum()),
        right=int((right & clear).sum()),
    )


def item_counts(plan: AttentionPlan) -> Float[np.ndarray, " 5"]:
    """Regressors: (1, single-row items, their tokens, multi-row items, their tokens)."""
    counts = [1.0]
    for work in sorted(plan.lists, key=lambda work: work.tile_rows):
        items = int(work.num_items)
        tokens = np.asarray(work.kv_stop)[:items] - np.asarray(work.kv_start)[:items]
        counts += [items, float(tokens.sum())]
    return np.array(counts)


def non_negative(
    counts: Float[np.ndarray, "X F"], times: Float[np.ndarray, " X"]
) -> Float[np.ndarray, " F"]:
    """Non-negative costs that minimise the squared relative errors; the most negative cost of an
    unconstrained fit is set to 0 until none is left."""
    free = np.ones(counts.shape[1], bool)
    rows = counts / times[:, None]
    while True:
        # Normalise the columns: the token counts are much larger than the others.
        size = np.linalg.norm(rows[:, free], axis=0)
        size[size == 0] = 1
        solved = np.linalg.lstsq(rows[:, free] / size, np.ones(len(times)), rcond=None)[0] / size
        if solved.min(initial=0) >= 0:
            costs = np.zeros(counts.shape[1])
            costs[free] = solved
            return costs
        free[np.flatnonzero(free)[(solved * size).argmin()]] = False


def on_device(kernel: Kernel, cases: Sequence[Pair]) -> Measure:
    """Measure on this machine; raises RuntimeError for a wrong result."""
    runner = PoolRunner(kernel, [case for pair in cases for case in pair])

    def measure(case: Case) -> tuple[float, AttentionPlan]:
        seconds, error, plan = runner.measure(case)
        if seconds != seconds:
            raise RuntimeError(f"wrong result, so no cost model: {case.name}, error {error:.1e}")
        print(f"{case.name}, sharing {case.share}: {1e6 * seconds:.1f} us", flush=True)
        return seconds, plan

    return measure


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = command_parser("bench.kernels.cost_model", __doc__)
    p.add_argument(
        "--heads", type=wholes(1, 3), default=[32, 8, 128], help="query heads, KV heads, head dim"
    )
    p.add_argument("--page-size", type=int, choices=PAGE_SIZES, default=64, help="tokens a page")
    p.add_argument("--backend", default="auto", choices=("auto", *NAMES), help="of the kernels")
    p.add_argument("--dtype", help="of queries and KV; default bfloat16, on a CPU float32")
    p.add_argument("--small", action="store_true", help="short cases, for a CPU")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Fit, print the error, and save."""
    options = parser().parse_args(arguments)
    kernel = choose_kernel(options.backend)
    if options.dtype:
        kernel = dataclasses.replace(kernel, dtype=jnp.dtype(options.dtype))
    N, K, H = options.heads
    tile_rows = kernel.tile_rows(N // K, H)
    cases = pairs(N, K, H, options.page_size, tile_rows, small=options.small)
    found = fit(cases, on_device(kernel, cases))
    if found.model.single_row_item + found.model.single_row_token == 0:
        print("single-row items have no cost in the fit: the times are too noisy, nothing is saved")
        return 1
    key = Fitted(jax.devices()[0].device_kind, kernel.name, N, K, H, kernel.dtype.name, tile_rows)
    quality = {f.name: getattr(found, f.name) for f in dataclasses.fields(Fit) if f.name != "model"}
    path = keep_cost_model(
        key,
        found.model,
        unit="microseconds",
        page_size=options.page_size,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        **quality,
    )
    print(found.model)
    print(
        f"held out: mean error {found.mean_error:.0%}, largest error {found.worst_error:.0%}; "
        f"{found.right} of {found.decisions} clear decisions right"
    )
    print(f"saved in {path}")
    target = options.json
    if target is None and jax.default_backend() == "gpu":
        target = RESULTS / "kernels_costs.json"
    if target is not None:
        row = dataclasses.asdict(key) | dataclasses.asdict(found.model) | quality
        save(target, record("bench.kernels.cost_model", [row], vars(options)))
    return 0


if __name__ == "__main__":
    run("bench.kernels.cost_model", main)
