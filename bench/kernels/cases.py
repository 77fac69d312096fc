"""Attention cases: batches over a paged pool, with the least time each can take."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.planner import PlanShape, plan_attention
from pallas_kernels.attention.work_list import AttentionPlan


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
        target_us: time to reach, None where none is set.
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
    target_us: float | None = None

    @property
    def own_tokens(self) -> np.ndarray:
        own = np.broadcast_to(np.asarray(self.own, np.int64), (self.batch,))
        return own

    @property
    def context(self) -> np.ndarray:
        return self.shared + self.own_tokens

    def flops(self) -> float:
        """Multiply-adds counted twice, causal part only."""
        lengths = self.context
        seen = lengths * self.queries - self.queries * (self.queries - 1) / 2
        return float(4 * self.N * self.H * seen.sum())

    def bytes(self, itemsize: int = 2) -> float:
        """Distinct K and V, queries and output, once each."""
        tokens = self.prefixes * self.shared * (self.share == "on") + self.own_tokens.sum()
        if self.share == "off":
            tokens = self.context.sum()
        rows = self.batch * self.queries
        return float(
            2 * tokens * self.K * self.H * itemsize + 2 * rows * self.N * self.H * itemsize
        )

    def floor_us(self, copy_rate: float, flop_rate: float) -> float:
        """The larger of bytes at the copy rate and FLOP at the matmul rate, microseconds."""
        return 1e6 * max(self.bytes() / copy_rate, self.flops() / flop_rate)


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Arrays of a case; ``pools`` holds several layers' pages, so that no layer stays in cache."""

    q: jax.Array
    pools: tuple[tuple[jax.Array, jax.Array], ...]
    page_table: jax.Array
    positions: jax.Array
    plan: AttentionPlan


def make_plan(case: Case, table: np.ndarray) -> AttentionPlan:
    lengths = case.context
    starts = np.arange(case.batch + 1) * case.queries
    longest = int(lengths.max())
    shape = PlanShape(
        rows=case.batch * case.queries,
        seqs=case.batch,
        max_context=longest,
        tile_rows=case.tile_rows,
        split_tokens=case.split,
    )
    plan, _ = plan_attention(
        table, starts, lengths, page_size=case.S, shape=shape, sharing=case.share
    )
    return plan


def make_inputs(case: Case, seed: int, layers: int, dtype=jnp.bfloat16) -> Inputs:
    """Random inputs; every page and every token slot that no sequence owns holds NaN."""
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
    dead = jnp.asarray(np.arange(S) >= used[:, None])[:, None, :, None]

    @jax.jit
    def pages(key):
        value = jax.random.normal(key, (total, case.K, S, case.H), dtype)
        return jnp.where(dead, jnp.asarray(jnp.nan, dtype), value)

    keys = jax.random.split(jax.random.key(seed), 2 * layers + 1)
    pools = tuple((pages(keys[2 * i]), pages(keys[2 * i + 1])) for i in range(layers))
    rows = case.batch * case.queries
    q = jax.random.normal(keys[-1], (rows, case.N, case.H), dtype)
    back = np.tile(np.arange(case.queries) - case.queries, case.batch)
    positions = np.repeat(lengths, case.queries) + back
    plan = jax.tree.map(jnp.asarray, make_plan(case, table))
    return Inputs(q, pools, jnp.asarray(table), jnp.asarray(positions, jnp.int32), plan)
