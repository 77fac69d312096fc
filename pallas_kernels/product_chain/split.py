"""How one product is cut over the programs of a launch."""

import dataclasses

import jax.numpy as jnp
from jax import lax

TILE_N = 128
"""Columns of a tile of weights."""

TILE_K = 64
"""Rows of a tile of weights: 128 bytes of bf16, the widest swizzle of the other operand."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProductSplit:
    """The tiles of weights [rows, columns], column after column of tiles, in equal runs (stream-K).

    A run may begin and end within a column of tiles, so its sums are pieces: the piece that run r
    adds to column b has the number r + b, which no other has. Method: Stream-K (Osama et al., 2023),
    without the hand-over: whoever needs the product adds its pieces, in the order of runs.

    Attributes:
        rows, columns: of the weights; multiples of TILE_K and TILE_N.
        programs: that take part at most.
    """

    rows: int
    columns: int
    programs: int

    @property
    def depth(self) -> int:
        """Tiles in a column."""
        return self.rows // TILE_K

    @property
    def width(self) -> int:
        """Columns of tiles."""
        return self.columns // TILE_N

    @property
    def runs(self) -> int:
        """Runs, one a program; none is empty."""
        return min(self.programs, self.depth * self.width)

    @property
    def pieces(self) -> int:
        """Numbers of pieces, used or not."""
        return self.runs + self.width

    @property
    def most_pieces(self) -> int:
        """Of one column of tiles."""
        return max(self.last_run(b) - self.first_run(b) + 1 for b in range(self.width))

    def run(self, program):
        """(first, last + 1) tile of a program, int32; equal where it has none."""
        tiles, runs = self.depth * self.width, self.runs
        start = jnp.minimum(program, runs) * tiles
        stop = jnp.minimum(program + 1, runs) * tiles
        return lax.div(start, jnp.int32(runs)), lax.div(stop, jnp.int32(runs))

    def first_run(self, column):
        """The first run with a tile of this column of tiles; int or int32."""
        return self._run_of(column * self.depth)

    def last_run(self, column):
        """The last run with a tile of this column of tiles; int or int32."""
        return self._run_of((column + 1) * self.depth - 1)

    def _run_of(self, tile):
        # Run r begins at tile floor(r * tiles / runs).
        place = (tile + 1) * self.runs - 1
        tiles = self.depth * self.width
        return place // tiles if isinstance(place, int) else lax.div(place, jnp.int32(tiles))
