"""Batches for the attention suite: groups with a shared prefix, chunks, NaN in unused slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rjax.pallas_kernels.attention.plan.host import PlanShape, Sharing, plan_attention
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan


@dataclasses.dataclass(frozen=True)
class Batch:
    """``shared`` tokens for each group of ``members`` sequences, then each sequence's own tokens;
    ``queries`` rows of each sequence are computed."""

    shared: int
    members: tuple[int, ...]
    own: tuple[int, ...]
    queries: tuple[int, ...]

    def __post_init__(self) -> None:
        assert sum(self.members) == len(self.own) == len(self.queries)


@dataclasses.dataclass(frozen=True)
class Arrays:
    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    row_table: jax.Array
    positions: jax.Array
    plan: AttentionPlan


DECODE = Batch(shared=0, members=(1, 1, 1), own=(1, 130, 77), queries=(1, 1, 1))
RELAY = Batch(shared=128, members=(5, 2), own=(3, 64, 1, 90, 17, 30, 129), queries=(1,) * 7)
CHUNKS = Batch(shared=64, members=(2, 1), own=(40, 100, 70), queries=(40, 1, 33))


def make_arrays(
    batch: Batch,
    *,
    N: int,
    K: int,
    H: int,
    S: int,
    tile_rows: int,
    split: int,
    sharing: Sharing,
    dtype,
    kv_dtype=None,
    padding_rows: int = 3,
) -> Arrays:
    rng = np.random.default_rng(7)
    B, own = len(batch.own), np.asarray(batch.own)
    shared = batch.shared - batch.shared % S
    lengths = shared + own
    M = -(-int(lengths.max()) // S) + 1
    pages_of = -(-own // S)
    total = len(batch.members) * (shared // S) + int(pages_of.sum()) + 2
    ids = list(rng.permutation(total))
    live = np.zeros(total, np.int64)
    junk = ids.pop()
    table = np.full((B, M), junk, np.int32)
    b = 0
    for members in batch.members:
        prefix = [ids.pop() for _ in range(shared // S)]
        live[prefix] = S
        for _ in range(members):
            mine = [ids.pop() for _ in range(pages_of[b])]
            live[mine] = np.clip(own[b] - np.arange(pages_of[b]) * S, 0, S)
            table[b, : len(prefix) + len(mine)] = prefix + mine
            b += 1
    queries = np.asarray(batch.queries)
    start = np.concatenate([[0], queries.cumsum()])
    T = int(start[-1]) + padding_rows
    positions = np.full(T, -1, np.int32)
    rows_table = np.full((T, M), junk, np.int32)
    for b in range(B):
        positions[start[b] : start[b + 1]] = lengths[b] - queries[b] + np.arange(queries[b])
        rows_table[start[b] : start[b + 1]] = table[b]
    shape = PlanShape(
        rows=T,
        seqs=B,
        max_context=int(lengths.max()),
        tile_rows=tile_rows,
        kv_split_size=split,
    )
    plan, _ = plan_attention(table, start, lengths, page_size=S, shape=shape, sharing=sharing)
    dead = (np.arange(S) >= live[:, None])[:, None, :, None]

    def pages():
        value = rng.standard_normal((total, K, S, H), np.float32)
        return jnp.asarray(np.where(dead, np.nan, value), kv_dtype or dtype)

    return Arrays(
        q=jnp.asarray(rng.standard_normal((T, N, H), np.float32), dtype),
        k_pages=pages(),
        v_pages=pages(),
        page_table=jnp.asarray(table),
        row_table=jnp.asarray(rows_table),
        positions=jnp.asarray(positions),
        plan=jax.tree.map(jnp.asarray, plan),
    )
