"""The tile scheduler: which CTA takes which work tiles, and in which order.

The schedule is static and persistent. CTA c of n takes work tiles c, c + n, c + 2 * n, ... of the
packed plan, whose cooperative work tiles come first. Two rules change that order:
  - A last round that is not full and holds head-pair tiles only goes to the last CTAs, because the
    first CTAs have the longer cooperative tiles.
  - Where the plan asks for it, odd CTAs take their work tiles from the last to the first, so that
    cooperative tiles (bound by compute) run beside head-pair tiles (bound by memory).
Reads int32 [3] from GMEM, once a CTA. The tests run the same code in plain JAX.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class TileScheduler:
    """The work tiles of one CTA.

    Attributes:
        cta: int32, index of the CTA.
        num_ctas: static, number of CTAs.
        full_rounds: int32, rounds in which every CTA has a work tile.
        last_round_cta: int32, place of this CTA in the last round.
        num_tiles: int32, work tiles of this CTA.
        backwards: bool, whether it takes them from the last to the first; None where no plan of
            these shapes asks for that.
    """

    cta: Any
    num_ctas: int
    full_rounds: Any
    last_round_cta: Any
    num_tiles: Any
    backwards: Any

    @classmethod
    def of(cls, cta, num_ctas: int, schedule: Any, can_reverse: bool) -> "TileScheduler":
        """The scheduler of one CTA.

        Args:
            schedule: int32 [3], ``PackedPlan.schedule``: work tiles, cooperative work tiles, and 1
                if odd CTAs go backwards.
            can_reverse: static; False ignores the last of these.
        """
        rounds, rest = (f(schedule[0], jnp.int32(num_ctas)) for f in (lax.div, lax.rem))
        last = jnp.where(schedule[0] - rest >= schedule[1], num_ctas - 1 - cta, cta)
        num_tiles = rounds + (last < rest).astype(jnp.int32)
        backwards = (lax.rem(cta, 2) == 1) & (schedule[2] != 0) if can_reverse else None
        return cls(cta, num_ctas, rounds, last, num_tiles, backwards)

    def tile_index(self, number):
        """Index of this CTA's work tile ``number`` in the packed plan.

        From ``num_tiles`` on the index is meaningless and may lie behind the last work tile.
        """
        if self.backwards is not None:
            number = jnp.where(self.backwards, jnp.maximum(self.num_tiles - 1 - number, 0), number)
        place = jnp.where(number < self.full_rounds, self.cta, self.last_round_cta)
        return place + number * self.num_ctas
