"""Attention cases: batches over a paged pool, with the least time each can take."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import Ceilings
from pallas_kernels.attention.planner import PlanShape, plan_attention
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.attention.split_policy import SplitPolicy
from pallas_kernels.attention.work_list import AttentionPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A time to reach: ``us``, or ``factor`` times the case's floor plus ``us``, or ``factor``
    times what the case named ``of`` took in the same run."""

    us: float = 0.0
    factor: float = 0.0
    of: str | None = None

    def at(self, floor_us: float, took_us: Mapping[str, float]) -> float | None:
        """Microseconds; None where the other case was not timed."""
        base = floor_us if self.of is None else took_us.get(self.of)
        return None if base is None else self.us + self.factor * base


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One batch: ``prefixes`` groups of sequences, each reading ``shared`` tokens, then its own.

    Attributes:
        name: as printed.
        batch: B sequences.
        shared: tokens of the common beginning of each group.
        own: tokens after it, of each sequence; a tuple gives each sequence its own number.
        prefixes: groups of equal size.
        queries: query rows of each sequence, the last tokens of its context (1 for decode).
        N, K, H, S: query heads, KV heads, head dim, tokens a page.
        share: read shared runs once.
        tile_rows, split: rows of a wide item and tokens at which items are cut.
        split_policy: of the PlanShape.
        fp8: KV in float8_e4m3fn pages with a scale a head, else in the queries' dtype.
        window, soft_cap: of the AttentionSpec.
        sinks: with a sink a head.
        target: what to reach on an H200, None where nothing is asked.
    """

    name: str
    batch: int
    shared: int
    own: int | tuple[int, ...]
    prefixes: int = 1
    queries: int = 1
    N: int = 32
    K: int = 8
    H: int = 128
    S: int = 64
    share: Literal["on", "off"] = "on"
    tile_rows: int = 16
    split: int = 512
    split_policy: SplitPolicy | None = None
    fp8: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    target: Target | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.H**-0.5, sliding_window=self.window, soft_cap=self.soft_cap)

    @property
    def own_tokens(self) -> np.ndarray:
        own = np.broadcast_to(np.asarray(self.own, np.int64), (self.batch,))
        return own

    @property
    def context(self) -> np.ndarray:
        return self.shared + self.own_tokens

    def flops(self) -> float:
        """Multiply-adds counted twice, visible part only."""
        back = np.arange(self.queries)[:, None]
        seen = self.context - back
        if self.window is not None:
            seen = np.minimum(seen, self.window)
        return float(4 * self.N * self.H * seen.sum())

    def bytes(self, itemsize: int = 2) -> float:
        """Distinct visible K and V, queries and output, once each.

        Args:
            itemsize: bytes of a number of queries and output, and of the KV unless it is fp8.
        """
        reach = self.context if self.window is None else self.window + self.queries - 1
        own = np.minimum(self.own_tokens, reach)
        shared = np.clip(reach - own, 0, self.shared)
        tokens = own.sum()
        if self.share == "on":
            tokens += shared.reshape(self.prefixes, -1).max(axis=1).sum()
        else:
            tokens += shared.sum()
        rows = self.batch * self.queries
        kv = 2 * tokens * self.K * self.H * (1 if self.fp8 else itemsize)
        return float(kv + 2 * rows * self.N * self.H * itemsize)

    def floor_us(self, ceilings: Ceilings, itemsize: int = 2) -> float:
        """The larger of bytes at the copy rate and FLOP at the matmul rate, microseconds."""
        return 1e6 * ceilings.seconds(self.bytes(itemsize), self.flops())


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Arrays of a case; ``pools`` holds several layers' pages, so that no layer stays in cache, and
    ``options`` the case's optional arguments: sinks, scales."""

    q: jax.Array
    pools: tuple[tuple[jax.Array, jax.Array], ...]
    page_table: jax.Array
    positions: jax.Array
    plan: AttentionPlan
    options: dict[str, jax.Array]

    @property
    def arguments(self) -> tuple[jax.Array, ...]:
        """Of one attention call over the first layer's pages, but for the plan and the options."""
        return (self.q, *self.pools[0], self.page_table, self.positions)


def make_plan(case: Case, table: np.ndarray) -> AttentionPlan:
    lengths = case.context
    starts = np.arange(case.batch + 1) * case.queries
    longest = int(lengths.max())
    shape = PlanShape(
        rows=case.batch * case.queries,
        seqs=case.batch,
        max_context=longest,
        tile_rows=case.tile_rows,
        kv_split_size=case.split,
        split_policy=case.split_policy,
    )
    plan, _ = plan_attention(
        table, starts, lengths, page_size=case.S, shape=shape, sharing=case.share
    )
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What of a case's inputs the host makes, as NumPy arrays.

    Attributes:
        page_table: [B, M]; behind a sequence's last page an id that no sequence owns.
        positions: [T] of the query rows.
        used: tokens written in each page of the pool.
        plan: of the batch.
        options: the case's optional arguments: sinks, scales.
    """

    page_table: np.ndarray
    positions: np.ndarray
    used: np.ndarray
    plan: AttentionPlan
    options: dict[str, np.ndarray]


def lay_out(case: Case, seed: int) -> Layout:
    """Pages dealt at random, with three that no sequence owns."""
    rng = np.random.default_rng(seed)
    S, lengths = case.S, case.context
    shared_pages = case.shared // S
    assert case.shared % S == 0
    table = np.zeros((case.batch, -(-int(lengths.max()) // S)), np.int32)
    total = case.prefixes * shared_pages + int((-(-case.own_tokens // S)).sum()) + 3
    ids = rng.permutation(total).astype(np.int32)
    used, cursor = np.zeros(total, np.int32), 0
    prefix_ids = []
    for _ in range(case.prefixes):
        prefix_ids.append(ids[cursor : cursor + shared_pages])
        used[prefix_ids[-1]] = S
        cursor += shared_pages
    for b in range(case.batch):
        own = int(case.own_tokens[b])
        count = -(-own // S)
        mine = ids[cursor : cursor + count]
        cursor += count
        table[b, :shared_pages] = prefix_ids[b * case.prefixes // case.batch]
        table[b, shared_pages : shared_pages + count] = mine
        table[b, shared_pages + count :] = ids[-1]
        used[mine] = np.clip(own - np.arange(count) * S, 0, S)
    back = np.tile(np.arange(case.queries) - case.queries, case.batch)
    positions = (np.repeat(lengths, case.queries) + back).astype(np.int32)
    options: dict[str, np.ndarray] = {}
    if case.sinks:
        options["sinks"] = np.linspace(-4, 8, case.N, dtype=np.float32)
    if case.fp8:
        options["k_scales"] = np.linspace(0.5, 1.5, case.K, dtype=np.float32)
        options["v_scales"] = np.linspace(1.5, 0.5, case.K, dtype=np.float32)
    return Layout(table, positions, used, make_plan(case, table), options)


def draw_layer(case: Case, dtype, key, layer, used) -> tuple[jax.Array, jax.Array]:
    """Random K and V pages of one layer; every token slot that no sequence owns holds NaN."""
    dead = (jnp.arange(case.S) >= used[:, None])[:, None, :, None]
    shape = (used.shape[0], case.K, case.S, case.H)

    def pages(key):
        value = jnp.where(dead, jnp.nan, jax.random.normal(key, shape, jnp.bfloat16))
        return value.astype(jnp.float8_e4m3fn if case.fp8 else dtype)

    k_key, v_key = jax.random.split(jax.random.fold_in(key, layer))
    return pages(k_key), pages(v_key)


def fill(
    case: Case, layout: Layout, seed: int, layers: int, dtype, draw: Callable[..., tuple]
) -> Inputs:
    """The arrays on the device; ``draw`` is ``draw_layer`` of this case and dtype, compiled."""
    key, used = jax.random.key(seed), jax.device_put(layout.used)
    pools = tuple(draw(key, np.int32(layer), used) for layer in range(layers))
    # On the host: few numbers, beside a program to compile.
    shape = (layout.positions.size, case.N, case.H)
    q = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)
    small = (layout.page_table, layout.positions, layout.plan, layout.options)
    return Inputs(jax.device_put(q), pools, *jax.device_put(small))


def make_inputs(case: Case, seed: int, layers: int, dtype=jnp.bfloat16) -> Inputs:
    """Random inputs; every page and every token slot that no sequence owns holds NaN."""
    draw = jax.jit(functools.partial(draw_layer, case, dtype))
    return fill(case, lay_out(case, seed), seed, layers, dtype, draw)
