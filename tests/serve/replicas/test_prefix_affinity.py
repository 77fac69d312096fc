"""Which replica a prompt goes to: blocks of its text, what replicas were given, their load."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rjax.replicas.prefix_affinity import PrefixAffinity
from rjax.replicas.prefix_blocks import BLOCK_BYTES, prefix_blocks

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONG = "All answers are short. " * 60


def blocks(path: str = CHAT, tenant: str = "anyone", **body) -> tuple[bytes, ...]:
    return prefix_blocks(path, json.loads(json.dumps(body)), tenant)


def chat(system: str, user: str, **more) -> tuple[bytes, ...]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return blocks(messages=messages, **more)


def common(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_equal_beginnings_are_equal_blocks():
    one, two = chat(LONG, "Who?"), chat(LONG, "When?", temperature=0.5)
    assert common(one, two) == len(LONG) // BLOCK_BYTES
    assert common(one, chat("x" + LONG, "Who?")) == 0
    assert common(one, chat(LONG, "Who?", tools=[{"type": "function"}])) == 0
    assert common(one, chat(LONG, "Who?", cache_salt="s")) == 0
    parts = [{"type": "text", "text": LONG}]
    assert one[:3] == blocks(messages=[{"role": "system", "content": parts}])[:3]


def test_tenants_and_routes():
    messages = [{"role": "user", "content": LONG}]
    one = blocks(messages=messages)
    assert common(one, blocks(messages=messages, tenant="key-2")) == 0
    assert blocks(TEXT, prompt=LONG)[0] != one[0]
    assert len(blocks(TEXT, prompt=[5] * 1000)) == -(-(2 * 1000 - 1) // BLOCK_BYTES)
    assert blocks(RESPONSES, input=messages) == one
    assert blocks(RESPONSES, instructions=LONG, input="a")[:3] == blocks(TEXT, prompt=LONG)[:3]
    assert blocks("/tokenize", prompt=LONG) == ()
    assert blocks(TEXT, prefix="p", prompt="a") != blocks(TEXT, prefix="q", prompt="a")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_any_json_has_blocks(value):
    for name in ("messages", "prompt", "input", "tools", "prefix", "instructions"):
        blocks(**{name: value})


def keys(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def test_a_prompt_goes_where_its_prefix_is():
    affinity = PrefixAffinity[str](tolerance=4)
    affinity.remember(keys("aaaa"), "A")
    affinity.remember(keys("bbbb"), "B")
    for prefix, home in ("aaa", "A"), ("bbb", "B"), ("aaaax", "A"):
        choice = affinity.choose(keys(prefix), {"A": 2, "B": 2})
        assert (choice.ranked[0], choice.reason) == (home, "prefix")
    assert affinity.choose(keys("ccc"), {"A": 1, "B": 0}).reason == "new"


def test_an_overloaded_replica_loses_its_prompts_and_less_cached_ones_first():
    affinity = PrefixAffinity[str](tolerance=4)
    affinity.remember(keys("aaaa"), "A")
    assert affinity.choose(keys("aaaa"), {"A": 3, "B": 0}).ranked == ["A", "B"]
    over = affinity.choose(keys("aaaa"), {"A": 5, "B": 0})
    assert (over.ranked, over.reason, over.matched) == (["B", "A"], "overloaded", 0)
    # Half of the prompt is cached: half of the tolerance.
    assert affinity.choose(keys("aaaabbbb"), {"A": 1, "B": 0}).ranked[0] == "A"
    assert affinity.choose(keys("aaaabbbb"), {"A": 3, "B": 0}).ranked[0] == "B"


def test_new_prefixes_spread_over_idle_replicas():
    affinity = PrefixAffinity[int](tolerance=4)
    for n in range(9):
        best = affinity.choose(keys(f"{n}aaa"), dict.fromkeys(range(3), 0)).ranked[0]
        affinity.remember(keys(f"{n}aaa"), best)
    held = affinity._num_blocks
    assert len(held) == 3 and len(set(held.values())) == 1


def test_what_was_used_longest_ago_is_forgotten_from_its_end():
    affinity = PrefixAffinity[str](tolerance=4, most_keys=6)
    affinity.remember(keys("abcd"), "A")
    affinity.remember(keys("xyz"), "B")
    assert len(affinity) == 6
    assert affinity.matched(keys("abcd")) == {"A": 3}
    assert affinity.matched(keys("xyz")) == {"B": 3}


@given(st.data())
def test_matches_are_those_of_a_plain_memory(data):
    """Against a set of (prefix, replica), while nothing is forgotten for want of room."""
    affinity, plain, alive = PrefixAffinity[int](tolerance=2), set(), {0, 1, 2}
    for _ in range(data.draw(st.integers(1, 25))):
        text = data.draw(st.text("ab", min_size=1, max_size=6))
        action = data.draw(st.sampled_from(["remember", "match", "keep"]))
        if action == "remember":
            replica = data.draw(st.sampled_from(sorted(alive)))
            affinity.remember(keys(text), replica)
            plain |= {(key, replica) for key in keys(text)}
        elif action == "keep":
            alive = set(data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1)))
            affinity.keep_only(alive)
            plain = {(key, replica) for key, replica in plain if replica in alive}
        expected = {}
        for replica in alive:
            found = [(key, replica) in plain for key in keys(text)]
            if count := [*found, False].index(False):
                expected[replica] = count
        assert affinity.matched(keys(text)) == expected
        assert affinity._num_blocks == {
            r: sum(replica == r for _, replica in plain) for r in affinity._num_blocks
        }
