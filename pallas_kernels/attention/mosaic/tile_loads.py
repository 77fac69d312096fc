"""How the tiles of a unit come from their pages into the ring."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.config import CONSUMERS, PARTS, TILE
from pallas_kernels.attention.mosaic.pack import KV_START, KV_STOP, TABLE_ROW
from pallas_kernels.attention.mosaic.ring import Ring
from pallas_kernels.mosaic_emit import evict_first


@dataclasses.dataclass(frozen=True, slots=True)
class TileLoads:
    """A unit's copies: two tiles into each slot of the ring, keys and values in turn.

    record: of the unit. pools: keys and values, [P, K, S, H] GMEM. table: int32 [B, M] GMEM. head:
    int32, the unit's first. wide: both tiles are of this head, one behind the other; else one is of
    the next head. leave: what is read need not stay in the L2 cache.
    """

    record: Any
    pools: tuple[Any, Any]
    table: Any
    head: Any
    wide: bool
    leave: bool

    def run(self, ring: Ring, tile, steps):
        """All of ``steps`` steps, as slots become free. tile: int32, slots filled so far."""
        ahead = self._page_size >= TILE  # else there are many

        def step(i, carry):
            tile, pages = carry
            # Read a step ahead, so that nobody waits for them.
            following = self._pages(i + 1) if ahead else ()
            pages = pages or self._pages(i)
            for pool in self.pools:
                slot = lax.rem(tile, jnp.int32(ring.slots))
                plgpu.barrier_wait(ring.free.at[slot])
                self._fill(ring, slot, pool, self._base(i), pages)
                tile = tile + 1
            return tile, following

        lax.fori_loop(0, steps, step, (tile, self._pages(jnp.int32(0)) if ahead else ()))

    @staticmethod
    def copies(S: int) -> int:
        """Copies into a slot, of which each arrives at its barrier."""
        return CONSUMERS * (TILE // min(S, TILE))

    @property
    def _page_size(self) -> int:
        return self.pools[0].shape[2]

    @property
    def _last(self):
        return self.record[KV_STOP] - 1

    def _base(self, i):
        return self.record[KV_START] + i * (TILE * (CONSUMERS if self.wide else 1))

    def _pages(self, i):
        """The page of each copy of a head in step ``i``, behind the unit's end the last one."""
        last = lax.div(self._last, jnp.int32(self._page_size))
        tokens = range(0, TILE * (CONSUMERS if self.wide else 1), min(self._page_size, TILE))
        places = (lax.div(self._base(i) + t, jnp.int32(self._page_size)) for t in tokens)
        return tuple(self.table[self.record[TABLE_ROW], jnp.minimum(p, last)] for p in places)

    def _fill(self, ring: Ring, slot, pool, base, pages):
        """Of a head's single tile only the part that is used need come, and of small pages those:
        what lies in the place of others is of another time, and is masked or cleared as the rest of
        a page is."""
        S, K = self._page_size, pool.shape[1]
        size = min(S, TILE)
        of_tile = TILE // size
        full = ring.full.at[slot]
        for w in range(CONSUMERS):
            head = self.head if self.wide else jnp.minimum(self.head + w, K - 1)
            mine = pages[w * of_tile : (w + 1) * of_tile] if self.wide else pages
            first = base + w * TILE if self.wide else base
            for n, page in enumerate(mine):

                def copy(tokens: int, head=head, w=w, n=n, page=page, first=first):
                    source = pool.at[page, head]
                    if tokens != S:
                        offset = pl.multiple_of(lax.rem(first, jnp.int32(S)), TILE)
                        source = source.at[pl.ds(offset, tokens)]
                    target = ring.halves.at[slot, w, pl.ds(n * size, tokens)]
                    plgpu.copy_gmem_to_smem(source, target, full)
                    if self.leave:
                        evict_first()

                if self.wide:
                    copy(size)
                elif S >= TILE:
                    _fewest(PARTS, self._last - first + 1, copy)
                elif n == 0:
                    copy(size)
                else:
                    used = first + n * size <= self._last
                    lax.cond(used, lambda c=copy: c(size), lambda: plgpu.barrier_arrive(full))


def _fewest(sizes: tuple[int, ...], used, copy):
    """``copy`` the least of these sizes that is not below ``used``, or the largest."""
    *smaller, size = sizes
    if not smaller:
        copy(size)
    else:
        more = used > smaller[-1]
        lax.cond(more, lambda: copy(size), lambda: _fewest(tuple(smaller), used, copy))
