"""Fits the costs by which engines decide what to share, on this machine's device.

    python -m bench.kernels.cost_model                       # for 32 query heads, 8 KV heads of 128
    python -m bench.kernels.cost_model --heads 14,2,64 --page-size 32

Times batches whose sequences share a beginning, read once and read by each, and fits by least
squares what an item of one row and what one of many rows costs, each as a constant and a part for
each of its tokens. A quarter of the measurements is left out of the fit and tells its error. The
fit is kept in the user's cache folder, where every engine with these heads on such a device finds
it; running this again replaces it.
"""

import argparse
import dataclasses
import datetime
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from bench.command_line import command_parser, run, wholes
from bench.kernels.backends import NAMES, Kernel, choose_kernel
from bench.kernels.cases import Case
from bench.kernels.pool_runner import PoolRunner
from bench.records import RESULTS, record, save
from pallas_kernels.attention.planner import CostModel
from pallas_kernels.attention.work_list import AttentionPlan
from rjax.config import PAGE_SIZES
from rjax.worker.cost_model import Fitted, keep_cost_model

COLUMNS = {
    "device": "device",
    "backend": "attention",
    "N": "N",
    "K": "K",
    "H": "H",
    "dtype": "KV",
    "narrow_item": "item of one row, us",
    "narrow_token": "and each token",
    "wide_item": "item of many, us",
    "wide_token": "and each token of it",
    "mean_error": "mean error held out",
    "worst_error": "worst",
    "right": "decisions right",
    "decisions": "of",
}
type Pair = tuple[Case, Case]
type Measure = Callable[[Case], tuple[float, AttentionPlan]]
_HELD_OUT = 4  # each fourth pair
_CLEAR = 1.03  # a ratio of times that is more than noise


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and how well it told what it was not fitted to.

    Attributes:
        model: costs in microseconds of the whole device.
        launch_us: what every call costs beside its items.
        mean_error, worst_error: of the time of a held-out case, relative.
        decisions, right: held-out pairs that clearly differ, and those that the model gets right.
    """

    model: CostModel
    launch_us: float
    mean_error: float
    worst_error: float
    decisions: int
    right: int


def pairs(N: int, K: int, H: int, S: int, tile_rows: int, *, small: bool) -> list[Pair]:
    """(shared, not shared) for several batch sizes and cuts; many cuts, so that the device is full
    and an item costs its share of it."""
    batches, cuts = ((2, 8), 3) if small else ((2, 8, 32, 128), 32)
    lengths = (S, 2 * S, 4 * S, 8 * S) if small else (128, 256, 512, 1024, 2048)
    found = []
    for rows in batches:
        for length in lengths:
            shared = Case(
                f"{rows} rows, {length} tokens",
                rows,
                cuts * length,
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
    """Measure all, fit to most, judge by the rest.

    Args:
        cases: each shared and not shared.
        measure: case to its seconds and plan.
    """
    found = [[measure(case) for case in pair] for pair in cases]
    us = np.array([[1e6 * seconds for seconds, _ in pair] for pair in found])
    counts = np.array([[item_counts(plan) for _, plan in pair] for pair in found])
    held = np.arange(len(cases)) % _HELD_OUT == _HELD_OUT - 1
    costs = non_negative(counts[~held].reshape(-1, 5), us[~held].ravel())
    told = counts[held] @ costs
    error = np.abs(told / us[held] - 1)
    ratio = us[held, 1] / us[held, 0]
    clear = np.maximum(ratio, 1 / ratio) > _CLEAR
    right = (told[:, 1] > told[:, 0]) == (ratio > 1)
    return Fit(
        model=CostModel(*(float(cost) for cost in costs[1:])),
        launch_us=float(costs[0]),
        mean_error=float(error.mean()),
        worst_error=float(error.max()),
        decisions=int(clear.sum()),
        right=int((right & clear).sum()),
    )


def item_counts(plan: AttentionPlan) -> Float[np.ndarray, " 5"]:
    """What is fitted against: (1, narrow items, their tokens, wide items, their tokens)."""
    counts = [1.0]
    for work in sorted(plan.lists, key=lambda work: work.tile_rows):
        items = int(work.num_items)
        tokens = np.asarray(work.kv_stop)[:items] - np.asarray(work.kv_start)[:items]
        counts += [items, float(tokens.sum())]
    return np.array(counts)


def non_negative(
    counts: Float[np.ndarray, "X F"], times: Float[np.ndarray, " X"]
) -> Float[np.ndarray, " F"]:
    """Costs of at least 0 with the least squares of relative errors; the most negative one of a
    free fit is set to 0 until none is left."""
    free = np.ones(counts.shape[1], bool)
    rows = counts / times[:, None]
    while True:
        # Columns of equal size, or tokens by the million would hide the launch.
        size = np.linalg.norm(rows[:, free], axis=0)
        size[size == 0] = 1
        solved = np.linalg.lstsq(rows[:, free] / size, np.ones(len(times)), rcond=None)[0] / size
        if solved.min(initial=0) >= 0:
            costs = np.zeros(counts.shape[1])
            costs[free] = solved
            return costs
        free[np.flatnonzero(free)[(solved * size).argmin()]] = False


def on_device(kernel: Kernel, cases: Sequence[Pair]) -> Measure:
    """Measures on this machine; a wrong result raises RuntimeError."""
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
    """Fit, say how well, keep."""
    options = parser().parse_args(arguments)
    kernel = choose_kernel(options.backend)
    if options.dtype:
        kernel = dataclasses.replace(kernel, dtype=jnp.dtype(options.dtype))
    N, K, H = options.heads
    tile_rows = kernel.tile_rows(N // K)
    cases = pairs(N, K, H, options.page_size, tile_rows, small=options.small)
    found = fit(cases, on_device(kernel, cases))
    if found.model.narrow_item + found.model.narrow_token == 0:
        print("narrow items came out as free: times too noisy for a fit, nothing is kept")
        return 1
    key = Fitted(jax.devices()[0].device_kind, kernel.name, N, K, H, kernel.dtype.name, tile_rows)
    told = {f.name: getattr(found, f.name) for f in dataclasses.fields(Fit) if f.name != "model"}
    path = keep_cost_model(
        key,
        found.model,
        unit="microseconds",
        page_size=options.page_size,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        **told,
    )
    print(found.model)
    print(
        f"held out: time wrong by {found.mean_error:.0%} in the mean, {found.worst_error:.0%} at "
        f"most; {found.right} of {found.decisions} clear decisions right"
    )
    print(f"kept in {path}")
    target = options.json
    if target is None and jax.default_backend() == "gpu":
        target = RESULTS / "kernels_costs.json"
    if target is not None:
        row = dataclasses.asdict(key) | dataclasses.asdict(found.model) | told
        save(target, record("bench.kernels.cost_model", [row], vars(options)))
    return 0


if __name__ == "__main__":
    run("bench.kernels.cost_model", main)
