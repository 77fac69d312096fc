"""Snapshots: which one is evicted, and that none outlives the KV pages before it."""

import random

import pytest

from rjax.batch.page_hash import PageHashes
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.state_pool import StatePool

S = 2


def chain(tokens) -> PageHashes:
    hashes = PageHashes(b"root", S)
    hashes.extend(tokens)
    return hashes


def make(num_states: int, num_pages: int = 64) -> tuple[BlockManager, StatePool]:
    pages = BlockManager(num_pages, S)
    return pages, StatePool(num_states, pages)


def cache_pages(blocks: BlockManager, hashes: PageHashes, start: int = 0) -> list[int]:
    """Pages of a chain from number ``start`` on, registered and held."""
    pages = blocks.allocate(len(hashes.keys) - start)
    for number, page in enumerate(pages, start):
        blocks.register(
            page,
            hashes.keys[number],
            hashes.parent(number),
            hashes.blocks[number],
            first=not number,
        )
    return pages


def snapshot(pool: StatePool, hashes: PageHashes, number: int) -> int:
    """A snapshot without an owner behind a page of a chain."""
    state = pool.allocate()
    pool.register(state, hashes, number)
    pool.release([state])
    return state


def kept(pool: StatePool, hashes: PageHashes) -> list[int]:
    return [n for n, key in enumerate(hashes.keys) if pool.find(key) is not None]


def test_snapshots_of_a_long_chain_thin_out():
    pages, pool = make(8)
    long = chain(range(32))
    cache_pages(pages, long)
    for number in range(1, 16, 2):
        snapshot(pool, long, number)
    others = [pool.allocate() for _ in range(4)]
    assert kept(pool, long) == [3, 7, 11, 15]
    pool.release(others)
    assert pool.counts().free == 4


def test_what_is_used_stays_and_what_saves_more_stays_longer():
    pages, pool = make(3)
    hot, short, long = (
        chain([first, *range(9, 9 + length)]) for first, length in enumerate((3, 1, 11))
    )
    for hashes in (hot, short, long):
        cache_pages(pages, hashes)
    for hashes in (hot, short, long):
        snapshot(pool, hashes, len(hashes.keys) - 1)
    for other in range(6):  # each is used once, and saves a page
        once = chain([20 + other, 1])
        cache_pages(pages, once)
        state = pool.find(hot.keys[-1])
        pool.acquire(state)
        pool.release([state])
        snapshot(pool, once, 0)
        assert kept(pool, hot) == [1]
        assert not kept(pool, short)
        assert kept(pool, long) == ([5] if other < 5 else [])


def test_a_snapshot_leaves_with_any_page_before_it():
    pages, pool = make(6, num_pages=8)
    long = chain(range(12))
    fork = chain([*range(6), 50, 51])
    held = cache_pages(pages, long)
    tail = cache_pages(pages, fork, 3)
    states = [snapshot(pool, long, 1), snapshot(pool, long, 5), snapshot(pool, fork, 3)]
    owned = pool.find(long.keys[5])
    pool.acquire(owned)
    assert pages.take_over(held[2])  # the third page is to be written again
    assert [pool.is_snapshot(state) for state in states] == [True, False, False]
    assert pool.counts().used == 1  # its owner keeps the state, which nobody finds
    pool.release([owned])
    assert pool.counts().free == 5
    assert snapshot(pool, long, 5) not in pool._tree  # a page before it is missing
    pages.register(held[2], long.keys[2], long.keys[1], long.blocks[2])
    snapshot(pool, long, 5)
    pages.release(held + tail)
    pages.allocate(3)
    assert kept(pool, long) == [1]
    pages.forget_cached()
    assert kept(pool, long) == []
    assert pool.counts().free == 6


@pytest.mark.parametrize("seed", range(3))
def test_the_evicted_one_has_the_lowest_priority(seed):
    """Against the definition, over random use of chains that share beginnings."""
    draw = random.Random(seed)
    pages, pool = make(6, num_pages=40)
    chains, evicted = [], 0
    for _ in range(300):
        beginning = draw.choice(chains)[: draw.randrange(1, 9)] if chains else []
        tokens = beginning + [draw.randrange(3) for _ in range(draw.randrange(2, 9))]
        chains = [*chains[-5:], tokens]
        hashes = chain(tokens)
        found = pages.match(hashes.keys)
        pages.acquire(found)
        fresh = cache_pages(pages, hashes, len(found))
        number = draw.randrange(len(hashes.keys))
        state = pool.find(hashes.keys[number])
        if state is not None:
            pool.acquire(state)
            pool.release([state])
        else:
            entries = sorted(map(pool._entry, pool._cached))
            was_full = not pool._free
            state = pool.allocate()
            if was_full:
                assert state == entries[0][2]
                evicted += 1
            pool.register(state, hashes, number)
            pool.release([state])
        pages.release(found + fresh)
        assert len(pool._queue) <= 2 * pool.num_states
        for other in pool._tree:
            assert pages.find(pool._tree.key(other)) is not None
    assert evicted > 20
