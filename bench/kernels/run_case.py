"""Check, then time, one case on one backend."""

import dataclasses
import math

import jax

from bench.ceilings import Ceilings
from bench.kernels.backends import Kernel
from bench.kernels.case_programs import CasePrograms
from bench.kernels.cases.attention import Case
from bench.kernels.timing import burst_seconds, seconds_per_call

CACHE_BYTES = 256 << 20  # distinct KV between two reads of the same pages: four times the L2
_CHAIN_US = 2000  # minimum device time of one dispatched run
LARGEST_ERROR = 1e-2


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of one case; times in microseconds, NaN if it was not timed.

    ``us`` is measured in short bursts, ``sustained_us`` in a continuous run (``timing``).
    """

    case: str
    variant: str
    us: float
    sustained_us: float
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
            f"{self.case:34s} {self.variant:26s} {self.us:9.1f} {self.sustained_us:9.1f} "
            f"{self.floor_us:9.1f} "
            f"{self.us / self.floor_us:6.2f} {target}  err {self.relative_error:.1e} "
            f"lse {self.lse_error:.1e} {'same' if self.bit_equal else 'DIFFERS'}"
        )


def lower_case(case: Case, kernel: Kernel, ceilings: Ceilings) -> CasePrograms:
    """The lowered programs of the case."""
    layers = distinct_layers(case)
    roofline = case.roofline_us(ceilings, kernel.dtype.itemsize)
    return CasePrograms(case, kernel, layers, chain_length(layers, roofline))


def run_case(
    case: Case, kernel: Kernel, ceilings: Ceilings, programs: CasePrograms | None = None
) -> Result:
    """A wrong result (``not result.correct``) is not timed.

    Args:
        programs: of the case, if they were created before.
    """
    programs = programs or lower_case(case, kernel, ceilings)
    inputs = programs.inputs()
    plan = programs.prepare(inputs.plan, inputs.positions)
    chain = programs.chain.bound(
        inputs.q, inputs.pools, inputs.page_table, inputs.positions, plan, inputs.options
    )
    judged = programs.judge(chain(), chain(), *inputs.arguments, inputs.options)
    relative, worst, same = (x.item() for x in judged)
    variant = f"split {case.split}, rows {case.tile_rows}"
    roofline = case.roofline_us(ceilings, kernel.dtype.itemsize)
    untimed = float("nan")
    result = Result(case.name, variant, untimed, untimed, roofline, relative, worst, same)
    if not result.correct:
        return result
    seconds, sustained = burst_seconds(chain), seconds_per_call(chain, repeats=4)
    us = 1e6 / programs.length
    return dataclasses.replace(result, us=us * seconds, sustained_us=us * sustained)


def distinct_layers(case: Case) -> int:
    """Number of page pools to cycle through, so that no KV is read from the L2 cache."""
    if jax.default_backend() == "cpu":
        return 1
    return max(2, min(16, math.ceil(CACHE_BYTES / case.bytes())))


def chain_length(layers: int, roofline_us: float) -> int:
    """Calls in one program, so that the device needs longer than the dispatch."""
    return (
        layers
        if jax.default_backend() == "cpu"
        else max(layers, min(192, math.ceil(_CHAIN_US / roofline_us)))
    )
