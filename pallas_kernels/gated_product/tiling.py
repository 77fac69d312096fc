"""How the gated product is cut, and where that can win."""

import dataclasses

ROWS = 64
"""Matrix rows of a tensor core instruction."""

ROW_COUNTS = (8, 16, 32, 64)
"""How many of them a step may fill."""

UNIT = 64
"""Depth and columns come in multiples of it."""

COLUMNS = (64, 96, 112, 128)
"""Of gate and up each, that programs are chosen to take: narrower tiles copy short runs."""

_SHARED_BYTES = 232448 - 2048  # of a Hopper multiprocessor, less barriers and alignment
_LEAST_BUSY = 0.8  # of the multiprocessors: with fewer at work XLA's product is faster
_RUN_COST = {32: 1.3, 64: 1.1, 128: 1.0}  # of a column, by the bytes that copies take in one run


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Cut of a gated product.

    Attributes:
        columns: of gate and of up that a program takes, a multiple of 16 up to 128.
        chunk: depth of a ring slot, a multiple of 64 that divides the depth.
        ring: slots.
    """

    columns: int
    chunk: int
    ring: int

    @property
    def swizzle(self) -> int:
        """Bytes of the widest pattern in shared memory whose rows divide a tile's."""
        return next(b for b in (128, 64, 32) if self.columns * 2 % b == 0)


def refusal(T: int, D: int, F: int) -> str | None:
    """Why the kernel cannot multiply [T, D] with [D, 2, F], or None."""
    if T not in ROW_COUNTS:
        return f"{T} rows; the kernel takes {', '.join(map(str, ROW_COUNTS))}, so pad them"
    if D % UNIT or F % UNIT:
        return f"weights of [{D}, 2, {F}]; the kernel takes multiples of {UNIT}"
    return None


def misfit(tiling: Tiling, T: int, D: int) -> str | None:
    """Why a tiling does not suit [T, D], or None."""
    n, chunk = tiling.columns, tiling.chunk
    if n % 16 or not 16 <= n <= 128:
        return f"{n} columns a program; multiples of 16 up to 128 will do"
    if chunk % UNIT or D % chunk:
        return f"a chunk of {chunk}; multiples of {UNIT} that divide {D} will do"
    most = most_slots(T, D, n, chunk)
    if not min(2, D // chunk) <= tiling.ring <= most:
        return f"a ring of {tiling.ring} slots; up to {most} will do"
    return None


def choose_tiling(T: int, D: int, F: int, multiprocessors: int) -> Tiling | None:
    """The tiling of least cost whose programs run all at once and leave few multiprocessors idle.

    None where there is none: the kernel is not expected to win there.
    """
    busy = [n for n in COLUMNS if _LEAST_BUSY <= -(-F // n) / multiprocessors <= 1]
    if not busy:
        return None
    n = min(busy, key=lambda n: n * _RUN_COST[Tiling(n, UNIT, 0).swizzle])
    return Tiling(n, UNIT, most_slots(T, D, n, UNIT))


def most_slots(T: int, D: int, n: int, chunk: int) -> int:
    """Slots of the longest ring that shared memory holds."""
    beyond = (ROWS - T) * chunk * 2  # what instructions read past the last slot's rows
    slot = (2 * n + T) * chunk * 2
    return min(D // chunk, (_SHARED_BYTES - beyond) // slot)
