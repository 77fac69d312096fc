"""The block manager against a simple model, under random use."""

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from rjax.batch.page_hash import PageHashes, root_key
from rjax.engine.pages.block_manager import BlockManager
from tests.properties import num_examples

PAGES, S = 12, 2


class BlockManagerMachine(RuleBasedStateMachine):
    """Owners match, allocate, register and release pages over a vocabulary of two tokens."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(PAGES, S)
        self.held: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}
        self.count = 0

    @rule(target=owners, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def enter(self, tokens):
        hashes = PageHashes(root_key("test"), S)
        hashes.extend(tokens)
        matched = self.blocks.match(hashes.keys)
        for page, key in zip(matched, hashes.keys, strict=False):
            assert self.content[page] == key, "a cached page holds what its key says"
        self.blocks.acquire(matched)
        available = self.blocks.num_available
        fresh = self.blocks.allocate(-(-len(tokens) // S) - len(matched))
        if fresh is None:
            assert -(-len(tokens) // S) - len(matched) > available
            self.blocks.release(matched)
            return multiple()
        pages = matched + fresh
        assert len(set(pages)) == len(pages)
        for page in fresh:
            assert all(page not in other for other in self.held.values())
            self.content.pop(page, None)
        for n, key in enumerate(hashes.keys):
            self.content[pages[n]] = key
            self.blocks.register(pages[n], key, hashes.parent(n), hashes.blocks[n])
        self.count += 1
        self.held[self.count] = pages
        return self.count

    @rule(owner=consumes(owners))
    def leave(self, owner):
        self.blocks.release(self.held.pop(owner))

    @rule()
    def forget(self):
        self.blocks.forget_cached()
        assert self.blocks.counts().cached == 0

    @invariant()
    def counts_add_up(self):
        counts = self.blocks.counts()
        assert counts.free + counts.used + counts.cached == counts.total == PAGES
        owned = {page for pages in self.held.values() for page in pages}
        assert counts.used == len(owned)

    @invariant()
    def references_are_owners(self):
        for page in range(PAGES):
            owners = sum(page in pages for pages in self.held.values())
            assert self.blocks.references(page) == owners


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=num_examples(60), stateful_step_count=40)


def keys_of(tokens, root=b"r"):
    hashes = PageHashes(root, S)
    hashes.extend(tokens)
    return hashes.keys


def test_keys_are_a_chain_over_whole_pages():
    keys = keys_of([1, 2, 3, 4, 5])
    assert len(keys) == 2
    assert keys_of([9, 2, 3, 4])[1] != keys[1]
    assert keys_of([1, 2, 3, 4], root=b"other")[0] != keys[0]
    assert len(keys[0]) == hashlib.sha256().digest_size


def test_keys_grow_in_steps_as_at_once():
    hashes = PageHashes(b"r", S)
    hashes.extend([1, 2, 3])
    hashes.extend([3, 4, 5, 6], start=2)
    assert hashes.keys == keys_of([1, 2, 3, 4, 5, 6])


def test_least_recently_used_goes_first_and_from_the_end():
    blocks = BlockManager(4, S)
    old, new = keys_of([0, 0, 0, 1]), keys_of([1, 1, 1, 0])
    for keys in (old, new):
        pages = blocks.allocate(2)
        for page, key in zip(pages, keys, strict=True):
            blocks.register(page, key, b"", b"0000")
        blocks.release(pages)
    blocks.allocate(1)
    assert len(blocks.match(old)) == 1
    assert len(blocks.match(new)) == 2
    blocks.allocate(1)
    assert blocks.match(old) == []
    assert len(blocks.match(new)) == 2


def test_promises_end_with_the_page_or_with_the_owner():
    blocks = BlockManager(4, S)
    first, second = keys_of([0, 0, 1, 1])
    blocks.mark_pending([first, second], "a")
    blocks.mark_pending([first], "b")
    page = blocks.allocate(1)[0]
    blocks.register(page, first, b"r", b"0000")
    assert not blocks.is_pending(first)
    blocks.clear_pending([second], "b")
    assert blocks.is_pending(second)
    blocks.clear_pending([second], "a")
    assert not blocks.is_pending(second)
