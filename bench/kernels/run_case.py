"""Check, then time, one case on one backend."""

import dataclasses
import functools
import math

import jax

from bench.ceilings import Ceilings
from bench.kernels.backends import Kernel
from bench.kernels.cases import Case, Inputs, make_inputs
from bench.kernels.check import errors
from bench.kernels.timing import seconds_per_call

CACHE_BYTES = 256 << 20  # distinct KV between two reads of the same pages: four times the L2
_CHAIN_US = 2000  # least device time of one dispatched run
LARGEST_ERROR = 1e-2


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What one case took; times in microseconds, NaN where it was not timed."""

    case: str
    variant: str
    us: float
    floor_us: float
    relative_error: float
    lse_error: float
    bit_equal: bool
    target_us: float | None = None

    @property
    def correct(self) -> bool:
        return (
            self.relative_error < LARGEST_ERROR and self.lse_error < LARGEST_ERROR
        ) and self.bit_equal

    def line(self) -> str:
        target = f"{self.target_us:8.1f}" if self.target_us else "       -"
        return (
            f"{self.case:34s} {self.variant:26s} {self.us:9.1f} {self.floor_us:9.1f} "
            f"{self.us / self.floor_us:6.2f} {target}  err {self.relative_error:.1e} "
            f"lse {self.lse_error:.1e} {'same' if self.bit_equal else 'DIFFERS'}"
        )


def run_case(case: Case, kernel: Kernel, ceilings: Ceilings) -> Result:
    """A wrong result (``not result.correct``) is not timed."""
    spec, floor = case.spec, case.floor_us(ceilings, kernel.dtype.itemsize)
    inputs = make_inputs(case, 0, distinct_layers(case), kernel.dtype)
    prepare = jax.jit(kernel.prepare, static_argnums=2)
    plan = prepare(inputs.plan, inputs.positions, (case.N, case.K))
    one = jax.jit(functools.partial(kernel.attention, spec=spec))
    out, lse = one(*inputs.arguments, plan, **inputs.options)
    again, lse_again = one(*inputs.arguments, plan, **inputs.options)
    same = bool((out == again).all()) and bool((lse == lse_again).all())
    relative, worst = errors(case, inputs, out, lse, spec)
    variant = f"split {case.split}, rows {case.tile_rows}"
    result = Result(case.name, variant, float("nan"), floor, relative, worst, same)
    if not result.correct:
        return result
    return dataclasses.replace(result, us=1e6 * _time(kernel, case, inputs, plan, floor))


def distinct_layers(case: Case) -> int:
    """Pools of pages to go round, so that no call finds its KV in the cache."""
    if jax.default_backend() == "cpu":
        return 1
    return max(2, min(16, math.ceil(CACHE_BYTES / case.bytes())))


def chain_length(layers: int, floor_us: float) -> int:
    """Calls in one program, so that the device takes longer than dispatching it does."""
    return (
        layers
        if jax.default_backend() == "cpu"
        else max(layers, min(48, math.ceil(_CHAIN_US / floor_us)))
    )


def _time(kernel: Kernel, case: Case, inputs: Inputs, plan, floor_us: float) -> float:
    layers = len(inputs.pools)
    length = chain_length(layers, floor_us)

    @jax.jit
    def chain(q, pools, table, positions, plan, options):
        # Each call's output is the next one's query, as in a model's layers: they run in order.
        for i in range(length):
            k, v = pools[i % layers]
            q, _ = kernel.attention(q, k, v, table, positions, plan, spec=case.spec, **options)
        return q

    args = (inputs.q, inputs.pools, inputs.page_table, inputs.positions, plan, inputs.options)
    return seconds_per_call(functools.partial(chain, *args), repeats=4) / length
