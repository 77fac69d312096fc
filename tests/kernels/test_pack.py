"""The packed plan: NumPy computes what the kernel computes with it."""

import functools

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.attention.mosaic import PackedPlan, pack_plan
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import KV_START, KV_STOP, TileScheduler
from rjax.pallas_kernels.attention.plan.host import PlanShape, plan_attention
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.attention.reference import paged_attention_reference
from rjax.pallas_kernels.attention.spec import AttentionSpec

pack = jax.jit(pack_plan, static_argnums=2)


def run_work_tiles(packed: PackedPlan, a: batches.Arrays, scale: float):
    """Every live work tile to its destinations, then the merge of rows with several results."""
    N, K, H = packed.heads
    G, T, S = N // K, a.q.shape[0], a.k_pages.shape[2]
    out, lse = np.zeros((T, N, H)), np.full((T, N), -np.inf)
    entries = packed.num_merge_entries
    part, part_lse = np.full((entries, N, H), np.nan), np.full((entries, N), np.nan)
    tiles, destinations = np.asarray(packed.work_tiles), np.asarray(packed.destinations)
    positions, table = np.asarray(a.positions), np.asarray(a.page_table)
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (a.q, a.k_pages, a.v_pages))
    assert not tiles[int(packed.num_tiles) :].any()
    for row, rows, sequence, start, stop, unmasked, slot, code in tiles[: int(packed.num_tiles)]:
        head, which = divmod(int(code), len(packed.lists))
        tokens = np.arange(start, stop)
        pages, offsets = table[sequence, tokens // S], tokens % S
        one_head = packed.lists[which].cooperative or H > 256
        for kv_head in range(head, min(head + (1 if one_head else 2), K)):
            heads = slice(kv_head * G, (kv_head + 1) * G)
            for r in range(rows):
                seen = tokens <= positions[row + r]
                assert seen[: max(unmasked - start, 0)].all()
                assert seen.any()
                keys = k_pages[pages, kv_head, offsets][seen]
                scores = q[row + r, heads] @ keys.T * scale
                total = np.log(np.exp(scores).sum(-1))
                value = np.exp(scores - total[:, None]) @ v_pages[pages, kv_head, offsets][seen]
                entry = destinations[slot + r]
                target, target_lse = (out, lse) if entry < 0 else (part, part_lse)
                target[row + r if entry < 0 else entry, heads] = value
                target_lse[row + r if entry < 0 else entry, heads] = total
    indptr = np.asarray(packed.merge_indptr)
    for t in range(T):
        mine = slice(indptr[t], indptr[t + 1])
        if indptr[t + 1] - indptr[t] > 1:
            lse[t] = np.log(np.exp(part_lse[mine]).sum(0))
            out[t] = (np.exp(part_lse[mine] - lse[t])[..., None] * part[mine]).sum(0)
    return out, lse


@pytest.mark.sample(3, 3)
@pytest.mark.parametrize("sharing", ["on", "off"])
@pytest.mark.parametrize("batch", [batches.DECODE, batches.RELAY, batches.CHUNKS])
@pytest.mark.parametrize(
    ("N", "K", "H", "tile_rows"), [(8, 2, 16, 32), (8, 2, 16, 16), (9, 3, 16, 42), (8, 2, 512, 16)]
)
def test_work_tiles_and_destinations(batch, sharing, N, K, H, tile_rows):
    a = batches.make_arrays(
        batch,
        N=N,
        K=K,
        H=H,
        S=32,
        tile_rows=tile_rows,
        split=64,
        sharing=sharing,
        dtype=jnp.float32,
    )
    packed = pack(a.plan, a.positions, (N, K, H))
    assert isinstance(packed, PackedPlan)
    spec = AttentionSpec(H**-0.5)
    out, lse = run_work_tiles(packed, a, spec.scale)
    reference = jax.jit(functools.partial(paged_attention_reference, spec=spec))
    want, want_lse = reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rows", "shared", "own", "reverse"),
    [
        (256, 8192, 256, 1),
        (256, 2048, 256, 1),
        (64, 8192, 256, 0),  # single rows are soon done
        (256, 1024, 256, 0),  # the prefix is
        (256, 0, 2048, 0),
        (256, 8192, 0, 0),
    ],
)
def test_long_work_tiles_of_both_kinds_run_side_by_side(rows, shared, own, reverse):
    S, pages = 64, (shared + own) // 64
    table = np.tile(np.arange(pages), (rows, 1))
    table[:, shared // S :] += np.arange(rows)[:, None] * (own // S)
    lengths = np.full(rows, shared + own)
    shape = PlanShape(rows, rows, shared + own, tile_rows=32, kv_split_size=256)
    plan, _ = plan_attention(
        table, np.arange(rows + 1), lengths, page_size=S, shape=shape, sharing="on"
    )
    packed = pack(plan, jnp.asarray(lengths - 1), (32, 8, 128))
    assert isinstance(packed, PackedPlan)
    assert int(packed.reverse_odd_ctas) == reverse


def load_of_ctas(packed: PackedPlan, num_ctas: int):
    """Tokens of each CTA's work tiles, and 64 a work tile for its start and its end."""
    tiles, count = np.asarray(packed.work_tiles), int(packed.num_tiles)
    cost = 64 + tiles[:, KV_STOP] - tiles[:, KV_START]
    scheduler = TileScheduler.of(jnp.arange(num_ctas), num_ctas, packed.schedule, True)
    load = np.zeros(num_ctas, int)
    for number in range(-(-count // num_ctas)):
        index = np.clip(scheduler.tile_index(number), 0, count - 1)
        load += np.where(number < np.asarray(scheduler.num_tiles), cost[index], 0)
    assert load.sum() == cost[:count].sum()
    return load


@pytest.mark.sample(1)
@pytest.mark.parametrize("queries", [0, 64])
@pytest.mark.parametrize("spread", [0, 128])
def test_no_cta_has_much_more_work_than_others(queries, spread):
    """64 single rows over 2,048 shared and about 256 own tokens, alone and beside a prompt's."""
    own = 256 + np.random.default_rng(0).integers(-spread, spread + 1, 64)
    counts = np.append(np.ones(64, int), queries)[: 65 if queries else 64]
    lengths = 2048 + np.append(own, 96)[: counts.size]
    table = np.tile(np.arange(40), (counts.size, 1))
    table[:, 32:] += np.arange(counts.size)[:, None] * 8
    split_policy = SplitPolicy(16, 33, 64, multi_row_lanes=2, single_lane_rows=16)
    shape = PlanShape(
        64 + queries, 65, 2560, tile_rows=32, kv_split_size=256, split_policy=split_policy
    )
    start = np.append(0, counts.cumsum())
    plan, _ = plan_attention(table, start, lengths, page_size=64, shape=shape, sharing="on")
    positions = np.concatenate(
        [n - np.arange(c, 0, -1) for n, c in zip(lengths, counts, strict=True)]
    )
    packed = pack(plan, jnp.asarray(positions), (32, 8, 128))
    assert isinstance(packed, PackedPlan)
    load = load_of_ctas(packed, 132)
    assert load.max() < 1.1 * load.mean()
