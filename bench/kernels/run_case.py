"""Check, then time, one case on one backend."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from bench.kernels.cases import Case, Inputs, make_inputs
from bench.kernels.check import errors
from bench.kernels.timing import seconds_per_call
from pallas_kernels.attention.spec import AttentionSpec

_CACHE_BYTES = 256 << 20  # distinct KV between two reads of the same pages: four times the L2
_CHAIN_US = 2000  # least device time of one dispatched run


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one case took; times in microseconds."""

    case: str
    variant: str
    us: float
    floor_us: float
    relative_error: float
    lse_error: float
    bit_equal: bool
    target_us: float | None

    @property
    def correct(self) -> bool:
        return self.relative_error < 1e-2 and self.lse_error < 1e-2 and self.bit_equal

    def line(self) -> str:
        target = f"{self.target_us:8.1f}" if self.target_us else "       -"
        return (
            f"{self.case:34s} {self.variant:26s} {self.us:9.1f} {self.floor_us:9.1f} "
            f"{self.floor_us / self.us:6.2f} {target}  err {self.relative_error:.1e} "
            f"lse {self.lse_error:.1e} {'same' if self.bit_equal else 'DIFFERS'}"
        )


def run_case(
    case: Case,
    attention: Callable,
    variant: str,
    rates: tuple[float, float],
    *,
    timed: bool = True,
    pack: Callable | None = None,
) -> Result:
    """A wrong result (``not result.correct``) is not timed: its time is NaN."""
    spec = AttentionSpec(scale=case.H**-0.5)
    floor = case.floor_us(*rates)
    layers = max(2, min(16, math.ceil(_CACHE_BYTES / case.bytes()))) if timed else 1
    inputs = make_inputs(case, 0, layers)
    plan = pack(inputs.plan, inputs.positions, (case.N, case.K)) if pack else inputs.plan
    one = jax.jit(functools.partial(attention, spec=spec))
    args = (inputs.page_table, inputs.positions, plan)
    out, lse = one(inputs.q, *inputs.pools[0], *args)
    again, lse_again = one(inputs.q, *inputs.pools[0], *args)
    same = bool((out == again).all()) and bool((lse == lse_again).all())
    relative, worst = errors(case, inputs, out, lse, spec)
    result = Result(case.name, variant, float("nan"), floor, relative, worst, same, case.target_us)
    if not (timed and result.correct):
        return result
    took = _time(attention, spec, inputs, args, floor, layers)
    return dataclasses.replace(result, us=took * 1e6)


def _time(attention, spec, inputs: Inputs, args, floor_us: float, layers: int) -> float:
    length = max(layers, min(48, math.ceil(_CHAIN_US / floor_us)))

    @jax.jit
    def chain(q, pools, table, positions, plan):
        # Each call's output is the next one's query, as in a model's layers: they run in order.
        for i in range(length):
            k, v = pools[i % layers]
            q, _ = attention(q, k, v, table, positions, plan, spec=spec)
        return q

    run = functools.partial(chain, inputs.q, inputs.pools, *args)
    return seconds_per_call(run, repeats=4) / length
