"""Cases of the sum over devices, with targets on H200."""

SUMS = ((1, 4096, 14336), (16, 4096, 14336), (64, 4096, 14336), (256, 4096, 14336))
SUMS += ((1, 8192, 28672), (64, 8192, 28672))
"""Rows, columns, and the depth of the down-projection whose split-K partials are summed."""

SUM_TARGETS = {
    (2, 1, 4096): 8.0,
    (2, 64, 4096): 12.0,
    (4, 64, 8192): 13.0,
    (8, 64, 8192): 18.0,
}
"""Microseconds, by devices, rows and columns."""
