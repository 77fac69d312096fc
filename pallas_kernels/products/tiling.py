"""How the streaming kernels cut a product."""

import dataclasses

ROWS = 64
"""Matrix rows of a tensor core instruction; a step fills the first 8 or 16."""

_SHARED_BYTES = 232448 - 2048  # of a Hopper multiprocessor, less barriers and alignment
_SLOT_BYTES = 8192  # least weights of a slot
_UNIT = 64  # depth comes in multiples of it
_COLUMNS = range(16, 129, 16)
_NARROW_COST = {32: 1.3, 64: 1.1, 128: 1.0}  # of a column, by the bytes that copies take in one run


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Cut of a product.

    Attributes:
        columns: of a program, a multiple of 16; of gate and of up each.
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


def few_rows(T: int) -> bool:
    """Whether the kernels take a step of T rows."""
    return T in (8, 16)


def refusal(T: int, depth: int, columns: int, *, whole: bool) -> str | None:
    """Why the kernels cannot multiply [T, depth] with [depth, columns], or None.

    ``whole``: no tile may end beyond the columns.
    """
    if not few_rows(T):
        return f"{T} rows; the kernels take 8 or 16, so pad them"
    if depth % _UNIT:
        return f"a depth of {depth}; the kernels take multiples of {_UNIT}"
    unit = 16 if whole else 8
    if columns % unit or columns < 16:
        return f"{columns} columns; the kernels take multiples of {unit} from 16"
    return None


def choose_tiling(
    T: int, depth: int, columns: int, *, parts: int, whole: bool, multiprocessors: int
) -> Tiling:
    """The tiling that leaves the busiest multiprocessor the least, of wide runs if nearly equal.

    parts: matrices of so many columns each that a program reads.
    """

    def cost(n: int) -> float:
        programs = -(-columns // n)
        run = Tiling(n, 0, 0).swizzle
        return -(-programs // multiprocessors) * n * _NARROW_COST[run]

    fit = [n for n in _COLUMNS if not whole or columns % n == 0]
    n = min(fit, key=lambda n: (cost(n), -n))
    chunk = _choose_chunk(depth, parts * n)
    resident = 1 if -(-columns // n) <= multiprocessors else 2
    return Tiling(n, chunk, most_slots(T, depth, n, chunk, parts=parts, resident=resident))


def most_slots(T: int, depth: int, n: int, chunk: int, *, parts: int, resident: int) -> int:
    """Slots of the longest ring that ``resident`` programs a multiprocessor can have."""
    tail = (ROWS - T) * chunk * 2  # what instructions read beyond the last slot's rows
    slot = (parts * n + T) * chunk * 2
    return min(depth // chunk, max(2, (_SHARED_BYTES // resident - tail) // slot))


def _choose_chunk(depth: int, columns: int) -> int:
    fit = [chunk for chunk in range(_UNIT, 513, _UNIT) if depth % chunk == 0]
    return next((chunk for chunk in fit if chunk * columns * 2 >= _SLOT_BYTES), fit[-1])
