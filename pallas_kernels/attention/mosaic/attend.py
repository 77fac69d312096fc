"""One unit's way through the ring: products with its keys, softmax, products with its values."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.config import ROWS, TILE, KernelConfig, queries_in_registers
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.pack import ALL_VISIBLE
from pallas_kernels.attention.mosaic.softmax import Softmax

_WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """The K and V tiles of one unit, as one warpgroup meets them.

    Attributes:
        tiles: [slots, 2, 64, H] SMEM; from slot ``used`` on K and V take turns, one of each a step.
        full, free: barriers of the slots.
        used: slots that units before have used.
        halves: which of a slot's two tiles this warpgroup reads, in the order of their tokens.
        start, stop: the unit's KV tokens.
    """

    tiles: Any
    full: Any
    free: Any
    used: Any
    halves: tuple
    start: Any
    stop: Any

    def slot(self, step, *, values: bool):
        return lax.rem(self.used + 2 * step + int(values), jnp.int32(self.tiles.shape[0]))

    def first(self, step, place: int):
        """First token of a tile: the step's ``place``-th of this warpgroup."""
        return self.start + (step * len(self.halves) + place) * TILE

    def wait(self, step, *, values: bool) -> None:
        plgpu.barrier_wait(self.full.at[self.slot(step, values=values)])

    def give_back(self, step, *, values: bool) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(step, values=values)])


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Tiles of a step that are weighed at once: their places in it; whether they begin, end it."""

    places: tuple[int, ...]
    is_first: bool
    is_last: bool


def attend(
    cfg: KernelConfig,
    queries,
    ring: Ring,
    q_free,
    turns,
    wg,
    steps,
    record,
    reach,
    slopes,
    narrow: ByteTiles | None,
):
    """Online softmax over the unit's steps. Returns (acc [64, H], top [64], total [64]), float32.

    queries: [64, H] arrays whose products with the keys add up to the scores, in registers; where
    those are short, SMEM [2, number of them, 64, H], and a step's tiles come one after the other.
    turns: two barriers, by which two warpgroups take turns in giving work to the tensor cores, or
    None. reach: int32 [64], each row's position. slopes: float32 [64] in the kernel's units, or
    None. narrow: for tiles of 8 bits. ``top`` is in units of log2. Gives the queries' shared memory
    back (``q_free``) when it has been read.

    Wide units and tiles of 8 bits are ``overlapped``: a part's products with its keys go to the
    tensor cores together with the products of the part before with its values (the order of
    FlashAttention-3, Shah et al., 2024), in turn with the other warpgroup's softmax. Heads of more
    than 128 dims leave the ring too few slots for that, and units that wait for memory alone gain
    nothing.
    """
    H = ring.tiles.shape[-1]
    in_registers = queries_in_registers(H)
    places = tuple(range(len(ring.halves)))
    groups = [places] if in_registers and narrow is None else [(place,) for place in places]
    parts = [Part(some, some is groups[0], some is groups[-1]) for some in groups]
    dtype = ring.tiles.dtype if narrow is None else narrow.scratch.dtype
    softmax = Softmax(cfg, dtype, ring.stop, reach, slopes, narrow)

    def key_tiles(step, part: Part):
        """Turned, [H, 64]."""
        if part.is_first:
            ring.wait(step, values=False)
        slot = ring.slot(step, values=False)
        return [ring.tiles.at[slot, ring.halves[place]].transpose((1, 0)) for place in part.places]

    def value_tiles(step, part: Part, masked: bool):
        """In 16 bits. Where some tokens may be beyond the last one, their values are cleared."""
        if part.is_first:
            ring.wait(step, values=True)
        slot = ring.slot(step, values=True)
        tiles = [ring.tiles.at[slot, ring.halves[place]] for place in part.places]
        firsts = [ring.first(step, place) for place in part.places]
        if narrow is not None:
            [tile], [first] = tiles, firsts
            narrow.widen(tile, first, ring.stop - first, masked)
            if part.is_last:
                ring.give_back(step, values=True)
            return [narrow.scratch]
        if masked:
            for tile, first in zip(tiles, firsts, strict=True):
                _clear_tail(tile, ring.stop - first)
        return tiles

    def all_queries(step):
        if in_registers:
            return queries
        # Else their addresses are worked out before the loop, and fill registers.
        own, _ = lax.optimization_barrier((wg, step))
        return [queries.at[own, n] for n in range(queries.shape[1])]

    def multiply(some_queries=(), keys=(), acc=None, weights=(), values=()):
        """(queries @ keys for each of these tiles, acc + weights @ values), in one turn."""

        def run(refs) -> None:
            score_refs, acc_refs = refs
            for ref, tile in zip(score_refs, keys, strict=True):
                for some in some_queries:
                    plgpu.wgmma(ref, some, tile)
            for some, tile in zip(weights, values, strict=True):
                plgpu.wgmma(acc_refs[0], some, tile)
            if turns is not None:
                plgpu.barrier_arrive(turns.at[1 - wg])

        zero = plgpu.layout_cast(jnp.zeros((ROWS, TILE), jnp.float32), _WGMMA)
        scores = [plgpu.WGMMAAccumulatorRef.init(zero) for _ in keys]
        sums = [] if acc is None else [plgpu.WGMMAAccumulatorRef.init(acc)]
        if turns is not None:
            plgpu.barrier_wait(turns.at[wg])
        scores, sums = pl.run_state(run)((scores, sums))
        return scores, sums[0] if sums else None

    def weigh(scores, now, state, masked: bool):
        """(state, weights): of a part, (step, Part), whose scores are there."""
        (step, part), (acc, top, total) = now, state
        if part.is_last:
            ring.give_back(step, values=False)
        firsts = [ring.first(step, place) for place in part.places]
        weights, peaks, total = softmax.weigh(scores, firsts, top, total, masked)
        acc, weights = softmax.fade(acc, weights, top, peaks)
        # All of it is done when the next turn is taken.
        return lax.optimization_barrier(((acc, peaks[-1], total), weights))

    def added(before) -> None:
        step, part = before
        if part.is_last and narrow is None:
            ring.give_back(step, values=True)

    def begin(now, state, masked: bool):
        """The state and the weights of a part."""
        scores, _ = multiply(all_queries(now[0]), key_tiles(*now))
        return weigh(scores, now, state, masked)

    def follow(before, now, state, weights, masked: bool):
        """The same for ``now``; the values of the part ``before`` are added with its products."""
        keys, values = key_tiles(*now), value_tiles(*before, masked)
        scores, acc = multiply(all_queries(now[0]), keys, state[0], weights, values)
        added(before)
        return weigh(scores, now, (acc, *state[1:]), masked)

    def end(before, state, weights, masked: bool):
        """The state when the values of the part ``before`` have been added."""
        values = value_tiles(*before, masked)
        _, acc = multiply(acc=state[0], weights=weights, values=values)
        added(before)
        return acc, *state[1:]

    def overlapped(state):
        """All the unit's parts, each one's values added while the next one is weighed."""

        def run(i, carry, masked: bool):
            chain = [(i - 1, parts[-1]), *((i, part) for part in parts)]
            for before, now in itertools.pairwise(chain):
                carry = follow(before, now, *carry, masked)
            return carry

        zero = jnp.int32(0)
        carry = begin((zero, parts[0]), state, True)
        plgpu.barrier_arrive(q_free)
        for before, now in itertools.pairwise(parts):
            carry = follow((zero, before), (zero, now), *carry, True)
        carry = _in_turn(run, jnp.int32(1), plain, steps, carry)
        return end((steps - 1, parts[-1]), *carry, True)

    def one_by_one(state):
        def run(i, state, masked: bool):
            for part in parts:
                state, weights = begin((i, part), state, masked)
                if in_registers:
                    pl.when(i == 0)(lambda: plgpu.barrier_arrive(q_free))
                state = end((i, part), state, weights, masked)
            return state

        state = _in_turn(run, jnp.int32(0), plain, steps, state)
        if not in_registers:
            plgpu.barrier_arrive(q_free)
        return state

    plain = jnp.int32(0)  # steps whose tokens all rows see
    if cfg.sliding_window is None:
        plain = lax.div(record[ALL_VISIBLE] - ring.start, jnp.int32(TILE * len(places)))
    state = softmax.initial(H)
    # Reads of shared memory may still be under way when an arrival that follows them is seen, and
    # the copy of the next unit's queries overtakes them. The first products have used the values:
    # behind those they have been read.
    if in_registers:
        pl.when(steps == 0)(lambda: plgpu.barrier_arrive(q_free))
    if in_registers and (len(places) > 1 or narrow is not None):
        return lax.cond(steps > 0, overlapped, lambda state: state, state)
    return one_by_one(state)


def _in_turn(run, first, plain, stop, carry):
    """``run(step, carry, masked)`` from step ``first`` to ``stop``, masked from ``plain`` on."""
    middle = jnp.maximum(first, plain)
    carry = lax.fori_loop(first, middle, lambda i, c: run(i, c, False), carry)
    return lax.fori_loop(middle, stop, lambda i, c: run(i, c, True), carry)


def _clear_tail(tile, used):
    """Zero the V rows from ``used`` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(used < TILE)
    def _():
        H = tile.shape[1]
        width = H if queries_in_registers(H) else TILE  # few registers for large head dims
        for start in range(0, H, width):
            some = tile.at[:, pl.ds(start, width)]
            value = plgpu.layout_cast(some[...], _WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA)
            some[...] = jnp.where(rows < used, value, jnp.zeros_like(value))
        plgpu.commit_smem()
