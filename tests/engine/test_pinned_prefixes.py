"""Named prefixes: many at once, nested, pinned, replaced, dropped, saved; salts and time limits."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from rjax.engine import deadlines
from rjax.errors import InvalidConfigError, InvalidRequestError, OutOfMemoryError
from rjax.sampling import SamplingParams

from .fake_worker import fake_engine
from .invariants import check
from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture
def engine():
    return fake_engine(num_pages=64, page_size=4, vocab=9, max_model_len=64)


def cached(engine, name, tokens, **options):
    engine.add_request(name, tokens, GREEDY, **options)
    return run(engine, [])[name].num_cached_tokens


def test_several_nested_prefixes_share_and_stay(engine):
    system, shots, other = [1] * 9, [1] * 9 + [2] * 6, [3] * 7
    engine.add_prefix("system", system)
    engine.add_prefix("shots", shots)
    engine.add_prefix("other", other)
    assert [p.name for p in engine.prefixes()] == ["system", "shots", "other"]
    assert engine.stats().kv_bytes_pinned == 3 + 2 + 2  # full pages of one serve the other
    engine.reset_prefix_cache()
    check(engine)
    for prefix in (system, shots, other):
        assert cached(engine, "r", [*prefix, 8, 7]) == len(prefix)
    for i in range(40):  # push everything else out
        cached(engine, "r", [i % 9, *[4] * 50])
    for name, prefix in (("system", system), ("shots", shots), ("other", other)):
        assert cached(engine, "r", [5, 6], prefix=name) == len(prefix)
    check(engine)


@pytest.mark.parametrize("rest", [0, 1, 3, 4, 31])
def test_any_number_of_tokens_in_the_last_page_is_pinned(rest):
    """A page is matched from an eighth of its tokens on; it is pinned with fewer."""
    engine = fake_engine(num_pages=64, page_size=32, vocab=9, max_model_len=128)
    prefix = [*[1] * 64, *[2] * rest]
    engine.add_prefix("a", prefix)
    assert engine.stats().kv_bytes_pinned == 2 + bool(rest)
    engine.reset_prefix_cache()
    assert cached(engine, "r", [3], prefix="a") == (64 if rest < 4 else len(prefix))
    engine.add_prefix("a", prefix)
    check(engine)


def test_a_prefix_is_replaced_and_dropped(engine):
    engine.add_prefix("a", [1] * 20)
    engine.add_prefix("a", [2] * 13)
    assert [p.token_ids for p in engine.prefixes()] == [(2,) * 13]
    engine.reset_prefix_cache()
    assert cached(engine, "r", [*[1] * 20, 3]) == 0
    assert cached(engine, "r", [*[2] * 13, 3]) == 13
    engine.drop_prefix("a")
    engine.reset_prefix_cache()
    assert engine._blocks.counts().used == 0
    assert cached(engine, "r", [*[2] * 13, 3]) == 0
    with pytest.raises(InvalidRequestError, match="no prefix is named 'a'; there are: none"):
        engine.drop_prefix("a")
    with pytest.raises(InvalidRequestError, match="no prefix is named"):
        engine.add_request("r", [1], GREEDY, prefix="a")


def test_bad_prefixes_are_refused(engine):
    for name in ("", "x" * 257, None):
        with pytest.raises(InvalidRequestError, match="1 to 256"):
            engine.add_prefix(name, [1])
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_prefix("a", [])
    engine.add_prefix("a", [1] * 60)
    engine.add_prefix("b", [2] * 60)
    engine.add_prefix("b", [3] * 60)
    engine.add_prefix("c", [4] * 60)
    with pytest.raises(OutOfMemoryError, match="drop a prefix"):
        engine.add_prefix("d", [5] * 60)
    check(engine)


def test_another_salt_finds_nothing(engine):
    prompt = [1, 2] * 10
    cached(engine, "r", prompt, cache_salt="one")
    assert cached(engine, "r", prompt, cache_salt="two") == 0
    assert cached(engine, "r", prompt) == 0
    assert cached(engine, "r", prompt, cache_salt="one") == 19
    engine.add_prefix("mine", [5] * 12, cache_salt="me")
    assert cached(engine, "r", [*[5] * 12, 1]) == 0
    assert cached(engine, "r", [1], prefix="mine") == 12
    for salt in ("", "x" * 129, 5):
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            engine.add_request("bad", prompt, GREEDY, cache_salt=salt)


def test_a_late_request_is_aborted(engine, monkeypatch):
    engine.add_request("late", [1], SamplingParams(max_tokens=50), timeout=60)
    engine.add_request("calm", [1], SamplingParams(max_tokens=50), timeout=1e6)
    engine.step()
    clock = time.monotonic() + 61
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: clock))
    done = run(engine, [])
    assert done["late"].outputs[0].finish_reason == "abort"
    assert done["calm"].outputs[0].finish_reason == "length"
    check(engine)
    for timeout in (0, -1, float("nan"), float("inf"), "1", True):
        with pytest.raises(InvalidRequestError, match="timeout"):
            engine.add_request("bad", [1], GREEDY, timeout=timeout)


def test_no_stream_of_better_requests_starves_a_worse_one():
    engine = fake_engine(max_num_seqs=1, vocab=9, priority_patience=8)
    engine.add_request("poor", [1], GREEDY, priority=2)
    ended = []
    for i in range(40):
        engine.add_request(f"rich{i}", [i % 9], GREEDY, priority=0)
        while f"rich{i}" not in ended and "poor" not in ended:
            ended += [o.request_id for o in engine.step() if o.finished]
        if "poor" in ended:
            break
    assert "poor" in ended
    assert 8 <= len(ended) <= 18


@pytest.mark.thorough
def test_saved_prefixes_are_loaded_and_checked(tiny, tmp_path):
    prefix = np.random.default_rng(0).integers(0, VOCAB, 43).tolist()
    requests = [(str(i), [*prefix, i, 2 * i], GREEDY) for i in range(3)]
    engine = make_engine(tiny, num_pages=64)
    engine.add_prefix("support", prefix)
    want = run(engine, requests)
    path = tmp_path / "support.safetensors"
    engine.save_prefix("support", path)

    loaded = make_engine(tiny, num_pages=64, prefix_files=(str(path),))
    assert loaded.stats().steps == 0
    assert [p.name for p in loaded.prefixes()] == ["support"]
    loaded.load_prefix(path, "again")
    assert len(set(loaded.pinned_pages())) == -(-len(prefix) // 8)
    got = run(loaded, requests)
    for key in want:
        assert got[key].outputs[0].token_ids == want[key].outputs[0].token_ids
        assert got[key].num_cached_tokens == len(prefix)
    check(loaded)

    for options, message in (
        ({"seed": 6}, "model"),
        ({"page_size": 16}, "page_size"),
        ({"dtype": "bfloat16"}, "save the prefix again"),
        ({"kv_cache_dtype": "fp8"}, "'float32'; this engine has 'float8_e4m3fn'"),
    ):
        with pytest.raises(InvalidConfigError, match=message):
            make_engine(tiny, num_pages=64, prefix_files=(str(path),), **options)
    with safe_open(str(path), "numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in ("tokens", "kv")}
    for token in (-1, VOCAB, 2**31 - 1):
        changed = np.array([*tensors["tokens"][:-1], token], np.int32)
        save_file(tensors | {"tokens": changed}, str(tmp_path / "changed"), metadata)
        with pytest.raises(InvalidConfigError, match=f"changed does not fit.*token id {token} is"):
            make_engine(tiny, num_pages=64, prefix_files=(str(tmp_path / "changed"),))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidConfigError, match="cannot be read"):
        make_engine(tiny, num_pages=64, prefix_files=(str(path),))


@pytest.mark.thorough
def test_a_step_reads_every_shared_run_once_whatever_else_is_in_the_batch(tiny):
    """Nested beginnings, several side by side, and requests that share nothing."""
    rng = np.random.default_rng(1)
    system, first, second, other, alone = (
        rng.integers(0, VOCAB, size).tolist() for size in (32, 16, 32, 48, 21)
    )
    prompts = [
        [*system, *first, 1],
        [*system, *first, 2, 3],
        [*system, *second, 4],
        [*system, *second, 5, 6, 7],
        [*other, 8],
        [*other, 9, 10],
        alone,
        [*system, 11],
    ]
    engine = make_engine(tiny, num_pages=64, enable_relay_attention="on", max_num_batched_tokens=64)
    split, steps = 16, []  # kv_split_size
    dispatch = engine._worker.dispatch

    def spy(batch, tables, **options):
        found = dispatch(batch, tables, **options)
        if all(item.stop - item.start == 1 for item in batch):
            runs = {}
            for item in batch:
                for start in range(0, item.stop, split):
                    stop = min(start + split, item.stop)
                    pages = tables[0, item.sequence.slot, start // 8 : -(-stop // 8)]
                    runs[start, tuple(pages)] = stop - start
            steps.append((len(batch), found.stats.kv_tokens_read, sum(runs.values())))
        return found

    engine._worker.dispatch = spy
    long = SamplingParams(temperature=0, max_tokens=12)
    run(engine, [(str(i), prompt, long) for i, prompt in enumerate(prompts)])
    assert any(rows == len(prompts) for rows, _, _ in steps)
    for rows, read, distinct in steps:
        assert read == distinct, rows
