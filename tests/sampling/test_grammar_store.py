"""The store of compiled grammars: what stays in the cache, and what ends at the bound of memory."""

import time
from dataclasses import dataclass

import pytest

from rjax.structured.grammar_store import GrammarStore


@dataclass(eq=False)
class Grammar:
    """A grammar of a size."""

    num_bytes: int = 1
    shared: bool = True
    failure: str | None = None


def store(size=9, num_bytes=100, total=1000, idle=60.0) -> GrammarStore:
    found = GrammarStore()
    found.limit(size, num_bytes, total, idle)
    return found


def kept(found: GrammarStore) -> list:
    return [key for key in range(20) if found.get(key) is not None]


def test_the_cache_keeps_the_last_ones_within_its_bounds():
    found = store(size=3, num_bytes=10)
    for key in range(4):
        found.add(key, Grammar(2))
    assert kept(found) == [1, 2, 3]
    found.get(1)
    found.add(4, Grammar(7))
    assert kept(found) == [1, 4]


def test_growth_counts_after_a_grammar_was_cached():
    found = store(num_bytes=10)
    first, second = Grammar(2), Grammar(2)
    found.add(0, first)
    found.add(1, second)
    second.num_bytes = 9
    found.check()
    assert kept(found) == [1]
    second.num_bytes = 11
    found.check()
    assert kept(found) == []


def test_what_may_not_be_shared_leaves():
    found = store()
    grammar = Grammar()
    found.add(0, grammar)
    found.add(1, Grammar(shared=False))
    assert kept(found) == [0]
    grammar.shared = False
    assert kept(found) == []


def test_an_idle_one_leaves_without_another_request():
    found = store(idle=0.2)
    found.add(0, Grammar())
    assert found._kept
    end = time.monotonic() + 60
    while found._kept and time.monotonic() < end:
        time.sleep(0.02)
    assert not found._kept


@pytest.mark.parametrize("shared", [False, True])
def test_beyond_the_total_the_largest_end(shared):
    found = store(num_bytes=10**6, total=20)
    grammars = [Grammar(size, shared) for size in (3, 9, 4)]
    for key, grammar in enumerate(grammars):
        found.add(key, grammar)
    assert not any(g.failure for g in grammars)
    grammars[2].num_bytes = 12
    found.check()
    assert [bool(g.failure) for g in grammars] == [False, False, True]
    del grammar
    grammars.pop()  # its requests have ended
    late = Grammar(19, shared)
    found.add(9, late)
    assert late.failure is not None
    assert not any(g.failure for g in grammars)
