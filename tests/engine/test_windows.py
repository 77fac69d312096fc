"""Layers with windows: pages behind them are given back, and no token changes."""

import json

import numpy as np
import pytest

from rjax.batch.page_groups import one_group, page_groups, pages_held, tokens_held
from rjax.batch.page_hash import PageHashes, group_key
from rjax.errors import OutOfMemoryError
from rjax.models import config_from_dict
from rjax.sampling import SamplingParams
from rjax.worker.pages.sizing import fit_pool

from .fake_worker import fake_engine
from .invariants import check
from .tiny import CONFIG, VOCAB, dense, make_engine, run

pytestmark = pytest.mark.usefixtures("no_annotations_checked")

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {"one of three is full": [SLIDING, FULL, SLIDING], "all": [SLIDING, SLIDING]}
WINDOW, S = 20, 8
MODEL = CONFIG | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": WINDOW,
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(folder, what gives its logits by a plain forward pass)."""
    kinds = KINDS[request.param]
    folder = tmp_path_factory.mktemp("windows")
    config = MODEL | {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, dense(folder)


def prompts() -> list[list[int]]:
    """Two short ones, two that share six pages, one that shares two of them, and another."""
    draw = np.random.default_rng(3)
    shared = draw.integers(3, VOCAB, 6 * S + 3).tolist()
    own = [draw.integers(3, VOCAB, size).tolist() for size in (3, 5, 5, 7, 20, 61)]
    return [*own[:2], shared + own[2], shared + own[3], shared[: 2 * S] + own[4], own[5]]


@pytest.mark.parametrize("windows", [(None, 3), (None, 3, 5), (3, 5), (3,)], ids=str)
def test_a_partial_page_that_does_not_fit_leaves_what_the_full_pages_need(windows):
    """A match to a page's middle reaches less of a window than the match to its begin does."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    least = pages_held(windows, 16, 4)
    for num_pages in range(least, least + 3):
        for same in (5, 6, 7):
            for length in range(same + 1, 16):
                engine = fake_engine(
                    num_pages=num_pages, windows=windows, page_size=4, max_model_len=16
                )
                cached = [1] * 8 + [0]
                for n, prompt in enumerate((cached, cached[:same] + [0] * (length - same))):
                    engine.add_request(str(n), prompt, params)
                    while engine.has_unfinished_requests():
                        engine.step()


def answers(logits, count: int) -> list[list[int]]:
    found = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(logits(tokens)[-1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def poison(engine) -> None:
    """Overwrite all pages that are neither held nor cached."""
    free = list(engine._blocks._free)
    if free:
        page = np.full((len(free), *engine._worker.page_shape), np.nan, np.float32)
        engine._worker.write_pages(free, page)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    ("pages", "options"),
    [
        (64, {"enable_relay_attention": "on", "check_values": True}),
        pytest.param(
            -3, {"preemption": "swap", "enable_relay_attention": "on"}, marks=pytest.mark.slow
        ),
        (-3, {"preemption": "recompute", "enable_prefix_caching": False}),
    ],
)
def test_tokens_are_those_of_one_sequence_at_a_time(model, pages, options):
    folder, logits = model
    groups = page_groups(
        config_from_dict(json.loads((folder / "config.json").read_text())).sliding_windows,
        page_size=S,
        max_model_len=160,
    )
    assert groups is not None
    if pages < 0:  # fewer than the prompts of three sequences, and enough for one
        pages = max(pages_held(groups.windows, 160, S), 3 * len(groups.windows) * 4 + pages)
    engine = make_engine(folder, num_pages=pages, max_num_seqs=4, **options)
    many = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for i, prompt in enumerate(prompts()):
        engine.add_request(str(i), prompt, many)
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        check_pages(engine)
        poison(engine)
    assert [done[str(i)].outputs[0].token_ids for i in range(6)] == answers(logits, 24)
    stats = engine.stats()
    if "preemption" in options:
        assert stats.preemptions > 0
    else:
        assert stats.cached_tokens >= 6 * S
        assert stats.kv_tokens_read < stats.kv_tokens_unshared
    if options.get("preemption") == "swap":
        assert stats.swaps > 0
    # Once more, from the cache.
    again = run(engine, [("again", prompts()[3], many)])["again"]
    assert again.outputs[0].token_ids == answers(logits, 24)[3]
    engine.close()


def windowed(engine, sequence) -> list[list[int]]:
    """Its pages in the groups with windows."""
    windows = engine._worker.pool.windows
    return [pages for w, pages in zip(windows, sequence.pages, strict=True) if w is not None]


def check_pages(engine) -> None:
    """No sequence holds more window pages than its last chunk and its window need."""
    most = (WINDOW + 32 - 2) // S + 2
    for sequence in engine._scheduler.running:
        for pages in windowed(engine, sequence):
            assert sum(page >= 0 for page in pages) <= most


@pytest.mark.sample(0, 1)
def test_a_long_sequence_holds_its_window(model):
    folder, _ = model
    engine = make_engine(folder, num_pages=64)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("long", [*range(3, 53)], params)
    held = set()
    while engine.has_unfinished_requests():
        engine.step()
        for sequence in engine._scheduler.running:
            if sequence.num_computed > 60:
                held |= {sum(page >= 0 for page in pages) for pages in windowed(engine, sequence)}
                full = -(-sequence.num_tokens // S) if None in engine._worker.pool.windows else 0
                windows = sum(window is not None for window in engine._worker.pool.windows)
                most = full + windows * (-(-(WINDOW - 1) // S) + 1)
                assert engine._blocks.counts().used == sequence.num_pages <= most
    assert held <= {3, 4}
    engine.close()


@pytest.mark.sample(0, 1)
def test_samples_and_a_saved_prefix(model, tmp_path):
    folder, logits = model
    engine = make_engine(folder, num_pages=64, enable_relay_attention="on")
    prompt = prompts()[2]
    greedy = SamplingParams(top_k=1, max_tokens=24, ignore_eos=True, n=3)
    done = run(engine, [("n", prompt, greedy)])
    wanted = answers(logits, 24)
    assert [c.token_ids for c in done["n"].outputs] == [wanted[2]] * 3
    engine.add_prefix("shared", prompts()[3][: 6 * S + 3])
    engine.save_prefix("shared", tmp_path / "prefix")
    [prefix] = engine.prefixes()
    windows = engine._worker.pool.windows
    assert len(prefix.pages) == sum(7 if window is None else 4 for window in windows)
    other = make_engine(folder, num_pages=64, enable_relay_attention="on")
    other.load_prefix(tmp_path / "prefix")
    poison(other)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for name in (engine, other):
        name.reset_prefix_cache()
        found = run(name, [("p", prompts()[3], params)])["p"]
        assert found.num_cached_tokens == 6 * S + 3
        assert found.outputs[0].token_ids == wanted[3]
    for one in (engine, other):
        one.close()


def cached(engine, name: str, tokens: list[int]) -> int:
    one = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request(name, tokens, one)
    found = run(engine, [])[name].num_cached_tokens
    check(engine)
    return found


@pytest.mark.parametrize("windows", [(None, 6, 6), (6,)])
def test_a_hit_needs_the_pages_of_the_window_before_its_end(windows):
    engine = fake_engine(
        num_pages=64, page_size=4, vocab=9, max_model_len=64, windows=windows, host=0
    )
    prompt = [n % 7 for n in range(41)]
    assert cached(engine, "first", prompt) == 0
    # Pages behind the window are cached until other sequences need the memory.
    assert cached(engine, "short", [*prompt[:20], 8, 8]) == 20
    blocks = engine._blocks
    last = len(windows) - 1
    sequence_keys = [key for key in blocks._page_of if len(key) == 32 + (last > 0)]
    assert len(sequence_keys) >= 10
    # Evict the fourth page of the last group: hits that end behind it within a window are gone.
    hashes = PageHashes(engine._salted_root(None), 4)
    hashes.extend(prompt)
    page = blocks.find(group_key(hashes.keys[3], last))
    assert page is not None
    del blocks._cached[page]
    blocks._forget(page)
    blocks._free.append(page)
    assert cached(engine, "behind", [*prompt[:20], 7, 7]) == 12
    assert cached(engine, "far behind", [*prompt[:32], 7, 7]) == 32


def test_what_a_long_context_takes():
    """Of Gemma 3 27B: 62 layers, of which every sixth has full attention."""
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(62))
    groups = page_groups(windows, page_size=64, max_model_len=131_072)
    assert groups is not None
    assert (groups.num_pools, groups.windows) == (10, (None, *[1024] * 6))
    assert sorted(groups.layers) == sorted(set(groups.layers)), "a place for each layer"
    pages = pages_held(groups.windows, 131_072, 64)
    assert pages == 2048 + 6 * 17
    assert 62 * 2048 / (groups.num_pools * pages) > 5.9  # times less memory
    assert tokens_held(groups.windows, pages, 64) == 131_072
    assert page_groups(windows, page_size=64, max_model_len=1024) == one_group(62)
    assert page_groups((None,) * 62, page_size=64, max_model_len=131_072) == one_group(62)
    # Padding of a group to the size of the others takes more than it saves.
    few = (1000, *[None] * 7)
    assert page_groups(few, page_size=64, max_model_len=1024) == one_group(8)


def test_the_pool_holds_more_tokens():
    given = {
        "page_size": 64,
        "num_seqs": 8,
        "memory": {"bytes_limit": 2**30, "bytes_in_use": 0},
        "num_devices": 1,
        "utilization": 1.0,
        "workspace_bytes": 0,
    }
    with pytest.raises(OutOfMemoryError, match="lower max_model_len to 10880 or less"):
        fit_pool(bytes_per_page=6 * 2**20, max_model_len=16_384, windows=(None,), **given)
    found = fit_pool(
        bytes_per_page=2**20, max_model_len=16_384, windows=(None, *[1024] * 5), **given
    )
    assert (found.num_pages, found.windows[1]) == (1024, 1024)
    with pytest.raises(OutOfMemoryError, match="lower max_model_len to 60096 or less"):
        fit_pool(bytes_per_page=2**20, max_model_len=2**17, windows=(None, *[1024] * 5), **given)
