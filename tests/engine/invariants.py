"""What must hold of the scheduler and its pages after every step."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable

from rjax.batch.page_groups import first_page
from rjax.batch.page_hash import PageHashes, group_key
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.llm_engine import LLMEngine
from rjax.outputs import RequestOutput


def run_checked(
    engine: LLMEngine, until: Callable[[], bool] = lambda: False
) -> dict[str, RequestOutput]:
    """Step to the end, with a check after each step; final outputs in the order of their coming."""
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests() and not until():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
        check(engine)
    return ended


def check(engine: LLMEngine) -> None:
    """Assert the invariants."""
    blocks, scheduler = engine._blocks, engine._scheduler
    counts = blocks.counts()
    assert counts.free + counts.used + counts.cached == counts.total
    assert counts.free == len(set(blocks._free))

    owners = Counter(page for s in scheduler.running for page in held_pages(s))
    for s in scheduler.running:
        assert len(set(held_pages(s))) == len(held_pages(s)) == s.num_pages
        _check_windows(engine, s)
    owners.update(engine.pinned_pages())
    assert all(blocks.references(p) == owners[p] for p in range(counts.total))
    assert counts.used == len(owners)

    _check_sharing(engine)

    writers = Counter(p for s in scheduler.running for p in held_pages(s, s.num_borrowed))
    assert all(count == 1 for count in writers.values()), "a page has two writers"

    host = scheduler.host
    assert host.num_free + host.num_used == host.num_slots
    held = Counter(slot for s in scheduler.swapped for slot in s.host_slots.values())
    assert held == Counter(host._references)

    queues = {
        SequenceStatus.WAITING: scheduler.waiting,
        SequenceStatus.RUNNING: scheduler.running,
        SequenceStatus.SWAPPED: scheduler.swapped,
    }
    every = [s for queue in queues.values() for s in queue]
    assert len(set(every)) == len(every), "in exactly one queue"
    for status, queue in queues.items():
        assert all(s.status is status for s in queue)
        in_order = not (scheduler._shares.several or scheduler._shares._stale)
        if queue is not scheduler.running or in_order:
            assert queue == sorted(queue, key=lambda s: s.order)
    _check_shares(engine)
    live = {s for r in engine._requests.values() for s in r.sequences}
    assert {s for s in live if s.status is not SequenceStatus.FINISHED} == set(every)
    slots = [s.slot for s in scheduler.running]
    assert len(set(slots)) == len(slots)
    for s in every:
        if s.status is not SequenceStatus.RUNNING:
            assert s.slot is None
            assert not s.pages
            assert not s.num_released
        else:
            capacities = [len(pages) * blocks.page_size for pages in all_groups(engine, s)]
            if scheduler.states is not None:
                capacities.append(scheduler.states.capacity(s))
                assert s.num_computed <= s.capacity
            else:
                assert s.num_stored <= s.capacity
            assert s.capacity == min(capacities)
    assert all(owner in scheduler.running for owner in blocks._pending.values())
    _check_keys(engine)
    if scheduler.states is not None:
        _check_states(engine)


def _check_states(engine: LLMEngine) -> None:
    """Every state has the owners that it counts; a sequence holds the state that it goes on from,
    and of those before only what the step before the next one read or wrote."""
    S, states, running = engine._page_size, engine._scheduler.states, engine._scheduler.running
    held = {s: [page for page in s.states if page >= 0] for s in running}
    owners = Counter(page for pages in held.values() for page in pages)
    owners.update(p.state for p in engine._prefixes.pinned.all() if p.state is not None)
    pool, counts = states.pool, states.pool.counts()
    assert all(pool.references(p) == owners[p] for p in range(pool.num_states))
    assert counts.used == len(owners)
    assert counts.free + counts.used + counts.cached == counts.total
    assert counts.free == len(set(pool._free))
    for s in running:
        computed = s.num_computed // S
        assert len(s.states) in (computed, computed + 1)
        assert not computed or s.states[computed - 1] >= 0
        assert all(page < 0 for page in s.states[: s.num_states_released])
        for number, page in enumerate(s.states):
            if number >= s.num_states_released:
                assert states.table[s.slot, number] == page
        writes = [page for page in s.states[s.num_states_registered :] if page >= 0]
        assert all(owners[page] == 1 for page in writes), "a state has two writers"
        shared = [page for page in held[s] if owners[page] > 1]
        assert all(pool.is_snapshot(page) for page in shared)
    _check_snapshots(engine)
    for s in [*engine._scheduler.waiting, *engine._scheduler.swapped]:
        assert not s.states
    host, saved = engine._scheduler.host_states, [s.saved_state for s in engine._scheduler.swapped]
    assert None not in saved
    assert {each.host_slot for each in saved} - {None} == host._references.keys()
    assert host.num_free + host.num_used == host.num_slots
    for each in saved:
        assert (each.host_slot is not None) == (each.has_page or each.has_tail)
        assert each.num_computed > 0


def _check_snapshots(engine: LLMEngine) -> None:
    """Every page before a snapshot is in the prefix cache; every state page that is neither free
    nor owned is a snapshot, and only a snapshot may be evicted."""
    pages, pool = engine._blocks, engine._scheduler.states.pool
    tree = pool._tree
    leads = set()
    for state in tree:
        assert state not in pool._free
        node = tree._nodes[tree.key(state)]
        assert tree.find(node.key) == state
        while node is not None:
            page = pages.find(node.key)
            assert page is not None, "a page before a snapshot is gone"
            before = b"" if node.parent is None else node.parent.key
            parent = pages._index.content(page).parent
            assert parent == before or not before, "another chain"
            leads.add(node.key)
            node = node.parent
    assert leads == tree._nodes.keys(), "a node leads to no snapshot"
    assert {s for s in tree if not pool.references(s)} == pool._cached.keys()
    assert engine.config.cache.enable_prefix_caching or not leads


def all_groups(engine: LLMEngine, s: Sequence) -> list[list[int]]:
    """The pages of a running sequence in each page group; -1 for those given back."""
    assert len(s.pages) == len(engine._worker.pool.windows)
    return s.pages


def held_pages(s: Sequence, start: int = 0) -> list[int]:
    """The pages that a sequence holds, in all page groups, from a page number on."""
    return [p for pages in s.pages for p in pages[start:] if p >= 0]


def _check_windows(engine: LLMEngine, s: Sequence) -> None:
    """It holds the pages that its next token reaches, and of those before only the ones that the
    step before the next one reached."""
    S, windows = engine._page_size, engine._worker.pool.windows
    for window, pages in zip(windows, all_groups(engine, s), strict=True):
        first = 0 if window is None else first_page(s.num_computed, window, S)
        assert all(page >= 0 for page in pages[first:])
        if window is None:
            continue
        gone = sum(page < 0 for page in pages)
        assert all(page < 0 for page in pages[:gone])
        budget = engine._worker.limits.max_num_batched_tokens
        assert len(pages) - gone <= (window + budget + S - 2) // S + 2


def _check_sharing(engine: LLMEngine) -> None:
    """What two requests hold is known to the tree, and under one salt.

    Of the pages of requests that an update of the weights lets run, only full ones are known
    afterwards, and one of several with the same tokens.
    """
    holders = defaultdict(set)
    roots = defaultdict(set)
    kept = set()
    for s in engine._scheduler.running:
        for page in held_pages(s):
            holders[page].add(s.request_id)
            roots[page].add(s.hashes.parent(0))
        if s.hashes.parent(0) != engine._roots.of(engine._requests[s.request_id].cache_salt):
            kept.update(held_pages(s))
    for prefix in engine.prefixes():
        for page in prefix.pages:
            holders[page].add(prefix)
            roots[page].add(engine._salted_root(prefix.cache_salt))
    for page, names in holders.items():
        if len(names) > 1:
            assert engine._blocks._index.content(page) is not None or page in kept, (
                "two requests in an unknown page"
            )
            assert engine.config.cache.enable_prefix_caching
        assert len(roots[page]) == 1, "two salts in one page"


def _check_shares(engine: LLMEngine) -> None:
    """What the division into shares knows of the sequences is so."""
    scheduler, shares = engine._scheduler, engine._scheduler._shares
    every = [*scheduler.waiting, *scheduler.running, *scheduler.swapped]
    assert shares._live == Counter(s.share for s in every)
    assert shares._rows == Counter(s.share for s in scheduler.running)
    assert shares._generating <= set(scheduler.running)


def _check_keys(engine: LLMEngine) -> None:
    """Chain keys are those of the tokens, computed anew; the tree's two ways agree."""
    blocks, scheduler = engine._blocks, engine._scheduler
    for s in [*scheduler.waiting, *scheduler.running, *scheduler.swapped]:
        assert (
            s.num_registered <= len(s.hashes.keys) or not engine.config.cache.enable_prefix_caching
        )
        fresh = PageHashes(s.hashes.parent(0), blocks.page_size)
        fresh.extend(s.tokens(0, len(s.hashes.keys) * blocks.page_size))
        assert s.hashes.keys == fresh.keys
        if s.status is not SequenceStatus.RUNNING:
            continue
        for group, pages in enumerate(all_groups(engine, s)):
            for n in range(min(s.num_registered, len(pages), len(fresh.keys))):
                content = blocks._index.content(pages[n]) if pages[n] >= 0 else None
                if content is not None:
                    assert content.parent == group_key(fresh.parent(n), group)
                    assert fresh.blocks[n].startswith(content.tokens)
    for key, page in blocks._page_of.items():
        assert blocks._key_of[page] == key
        content = blocks._index.content(page)
        assert content is not None
        parent, group = content.parent[:32], content.parent[32:]
        assert hashlib.sha256(parent + content.tokens).digest() + group == key
    assert len(blocks._page_of) == sum(key is not None for key in blocks._key_of)
