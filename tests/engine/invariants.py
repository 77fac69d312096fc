"""What must hold of the scheduler and its pages after every step."""

from collections import Counter

from rjax.engine.llm_engine import LLMEngine
from rjax.engine.sequence import SequenceStatus


def check(engine: LLMEngine) -> None:
    """Assert the invariants."""
    blocks, scheduler = engine._blocks, engine._scheduler
    counts = blocks.counts()
    assert counts.free + counts.used + counts.cached == counts.total
    assert counts.free == len(set(blocks._free))

    owners = Counter(page for s in scheduler.running for page in s.pages)
    for s in scheduler.running:
        assert len(set(s.pages)) == len(s.pages)
    owners.update(engine.pinned_pages())
    assert all(blocks.references(p) == owners[p] for p in range(counts.total))
    assert counts.used == len(owners)

    writers = Counter(p for s in scheduler.running for p in s.pages[s.num_borrowed :])
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
        assert queue == sorted(queue, key=lambda s: s.order)
    live = {s for r in engine._requests.values() for s in r.sequences}
    assert {s for s in live if s.status is not SequenceStatus.FINISHED} == set(every)
    slots = [s.slot for s in scheduler.running]
    assert len(set(slots)) == len(slots)
    for s in every:
        if s.status is not SequenceStatus.RUNNING:
            assert s.slot is None
            assert not s.pages
        else:
            assert s.num_stored <= s.capacity == len(s.pages) * blocks.page_size
    assert all(owner in scheduler.running for owner in blocks._promised.values())
