"""Attention cases: batches over a paged KV pool, with their rooflines."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import Ceilings
from rjax.pallas_kernels.attention.plan.host import PlanShape, plan_attention
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.attention.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A target time: ``factor`` times the case's roofline plus ``us``, or ``factor`` times the time
    of the case named ``of`` in the same run plus ``us``."""

    us: float = 0.0
    factor: float = 0.0
    of: str | None = None

    def at(self, roofline_us: float, took_us: Mapping[str, float]) -> float | None:
        """The target in microseconds; None if the other case was not timed."""
        base = roofline_us if self.of is None else took_us.get(self.of)
        return None if base is None else self.us + self.factor * base


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One batch of ``prefixes`` groups of sequences that share a prefix.

    Attributes:
        name: of the case.
        batch: B sequences.
        shared: tokens of the shared prefix of each group.
        own: unique tokens of each sequence after the prefix; a tuple has one number per sequence.
        prefixes: number of groups, of equal size.
        queries: query rows of each sequence, the last tokens of its context (1 for decode).
        N, K, H, S: query heads, KV heads, head dim, tokens per page.
        share: whether to read shared prefixes once.
        tile_rows, split: rows of a multi-row item, and KV split size.
        split_policy: of the PlanShape.
        fp8: KV in float8_e4m3fn pages with a scale per head, else in the queries' dtype.
        window, soft_cap: of the AttentionSpec.
        sinks: with a sink per head.
        target: on an H200, or None.
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
        """FLOP of the visible pairs; a multiply-add counts as two."""
        back = np.arange(self.queries)[:, None]
        seen = self.context - back
        if self.window is not None:
            seen = np.minimum(seen, self.window)
        return float(4 * self.N * self.H * seen.sum())

    def bytes(self, itemsize: int = 2) -> float:
        """Bytes of distinct visible K and V, queries and output, once each.

        Args:
            itemsize: bytes per element of queries and output, and of the KV unless it is fp8.
        """
        visible = self.context if self.window is None else self.window + self.queries - 1
        own = np.minimum(self.own_tokens, visible)
        shared = np.clip(visible - own, 0, self.shared)
        tokens = own.sum()
        if self.share == "on":
            tokens += shared.reshape(self.prefixes, -1).max(axis=1).sum()
        else:
            tokens += shared.sum()
        rows = self.batch * self.queries
        kv = 2 * tokens * self.K * self.H * (1 if self.fp8 else itemsize)
        return float(kv + 2 * rows * self.N * self.H * itemsize)

    def roofline_us(self, ceilings: Ceilings, itemsize: int = 2) -> float:
        """The roofline in microseconds: the larger of the times for bytes and for FLOP."""
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
        """Arguments of an attention call over the first layer's pages, without plan and options."""
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
    """The inputs of a case that the host creates, as NumPy arrays.

    Attributes:
        page_table: [B, M]; entries after the last page of a sequence are an unused page.
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
    """Random page tables; three pages are unused."""
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
    """Random K and V pages of one layer; unused token slots hold NaN."""
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
    # On the host, because another program would have to be compiled for a few numbers.
    shape = (layout.positions.size, case.N, case.H)
    q = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)
    small = (layout.page_table, layout.positions, layout.plan, layout.options)
    return Inputs(jax.device_put(q), pools, *jax.device_put(small))


def make_inputs(case: Case, seed: int, layers: int, dtype=jnp.bfloat16) -> Inputs:
    """Random inputs; every page and unused token slots hold NaN."""
    draw = jax.jit(functools.partial(draw_layer, case, dtype))
    return fill(case, lay_out(case, seed), seed, layers, dtype, draw)
