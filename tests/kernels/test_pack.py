"""The packed plan, proved by doing what the kernel does with it, in NumPy."""

import functools

import batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.joining import Joining
from pallas_kernels.attention.mosaic import PackedPlan, pack_plan
from pallas_kernels.attention.mosaic import pack as pack_module
from pallas_kernels.attention.mosaic.order import Turns
from pallas_kernels.attention.planner import PlanShape, plan_attention
from pallas_kernels.attention.reference import paged_attention_reference
from pallas_kernels.attention.spec import AttentionSpec

pytestmark = pytest.mark.usefixtures("quickly_compiled")
pack = jax.jit(pack_plan, static_argnums=2)


def run_units(packed: PackedPlan, a: batches.Arrays, scale: float):
    """Every live unit to its destination, then the merge of what has more than one result."""
    N, K = packed.heads
    G, (T, _, H), S = N // K, a.q.shape, a.k_pages.shape[2]
    out, lse = np.zeros((T, N, H)), np.full((T, N), -np.inf)
    part, part_lse = np.full((packed.entries, N, H), np.nan), np.full((packed.entries, N), np.nan)
    units, dest = np.asarray(packed.units), np.asarray(packed.dest)
    positions, table = np.asarray(a.positions), np.asarray(a.page_table)
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in (a.q, a.k_pages, a.v_pages))
    assert not units[int(packed.num_units) :].any()
    for row, rows, sequence, start, stop, visible, slot, code in units[: int(packed.num_units)]:
        head, which = divmod(int(code), len(packed.lists))
        tokens = np.arange(start, stop)
        pages, offsets = table[sequence, tokens // S], tokens % S
        for kv_head in range(head, min(head + (1 if packed.lists[which].wide else 2), K)):
            heads = slice(kv_head * G, (kv_head + 1) * G)
            for r in range(rows):
                seen = tokens <= positions[row + r]
                assert seen[: max(visible - start, 0)].all()
                assert seen.any()
                keys = k_pages[pages, kv_head, offsets][seen]
                scores = q[row + r, heads] @ keys.T * scale
                total = np.log(np.exp(scores).sum(-1))
                value = np.exp(scores - total[:, None]) @ v_pages[pages, kv_head, offsets][seen]
                entry = dest[slot + r]
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


@pytest.mark.parametrize("sharing", ["on", "off"])
@pytest.mark.parametrize("batch", [batches.DECODE, batches.RELAY, batches.CHUNKS])
@pytest.mark.parametrize(("N", "K", "tile_rows"), [(8, 2, 32), (8, 2, 16), (9, 3, 42)])
def test_units_and_destinations(batch, sharing, N, K, tile_rows):
    a = batches.make_arrays(
        batch,
        N=N,
        K=K,
        H=16,
        S=32,
        tile_rows=tile_rows,
        split=64,
        sharing=sharing,
        dtype=jnp.float32,
    )
    packed = pack(a.plan, a.positions, (N, K))
    assert isinstance(packed, PackedPlan)
    out, lse = run_units(packed, a, 0.25)
    reference = jax.jit(functools.partial(paged_attention_reference, spec=AttentionSpec(0.25)))
    want, want_lse = reference(a.q, a.k_pages, a.v_pages, a.row_table, a.positions)
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "shared", "own", "turned"),
    [
        (256, 8192, 256, 1),
        (256, 2048, 256, 1),
        (64, 8192, 256, 0),  # single rows are soon done
        (256, 1024, 256, 0),  # the prefix is
        (256, 0, 2048, 0),
        (256, 8192, 0, 0),
    ],
)
def test_long_units_of_both_kinds_run_side_by_side(rows, shared, own, turned):
    S, pages = 64, (shared + own) // 64
    table = np.tile(np.arange(pages), (rows, 1))
    table[:, shared // S :] += np.arange(rows)[:, None] * (own // S)
    lengths = np.full(rows, shared + own)
    shape = PlanShape(rows, rows, shared + own, tile_rows=32, split_tokens=256)
    plan, _ = plan_attention(
        table, np.arange(rows + 1), lengths, page_size=S, shape=shape, sharing="on"
    )
    packed = pack(plan, jnp.asarray(lengths - 1), (32, 8))
    assert isinstance(packed, PackedPlan)
    assert int(packed.turned) == turned


def load_of_programs(packed: PackedPlan, programs: int):
    """Tokens of the units that each program takes, and 64 a unit to begin and to end."""
    units, count = np.asarray(packed.units), int(packed.num_units)
    cost = 64 + units[:, pack_module.KV_STOP] - units[:, pack_module.KV_START]
    turns = Turns.of(jnp.arange(programs), programs, packed.order, True)
    load = np.zeros(programs, int)
    for number in range(-(-count // programs)):
        place = np.clip(turns.unit(number), 0, count - 1)
        load += np.where(number < np.asarray(turns.count), cost[place], 0)
    assert load.sum() == cost[:count].sum()
    return load


@pytest.mark.parametrize("queries", [0, 64])
@pytest.mark.parametrize("spread", [0, 128])
def test_no_program_has_much_more_than_others(queries, spread):
    """64 single rows over 2,048 shared and about 256 own tokens, alone and beside a prompt's."""
    own = 256 + np.random.default_rng(0).integers(-spread, spread + 1, 64)
    counts = np.append(np.ones(64, int), queries)[: 65 if queries else 64]
    lengths = 2048 + np.append(own, 96)[: counts.size]
    table = np.tile(np.arange(40), (counts.size, 1))
    table[:, 32:] += np.arange(counts.size)[:, None] * 8
    joining = Joining(16, 33, 64, wide_lanes=2, paired_rows=16)
    shape = PlanShape(64 + queries, 65, 2560, tile_rows=32, split_tokens=256, joining=joining)
    start = np.append(0, counts.cumsum())
    plan, _ = plan_attention(table, start, lengths, page_size=64, shape=shape, sharing="on")
    positions = np.concatenate(
        [n - np.arange(c, 0, -1) for n, c in zip(lengths, counts, strict=True)]
    )
    packed = pack(plan, jnp.asarray(positions), (32, 8))
    assert isinstance(packed, PackedPlan)
    load = load_of_programs(packed, 132)
    assert load.max() < 1.1 * load.mean()
