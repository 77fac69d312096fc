"""The server beside its engine: the load, the served model, and a whole run on a small one."""

import numpy as np
import pytest

from bench import server_share
from bench.serve.load import SHARED, UNIQUE, ServerLoad, latencies
from bench.serve.model import write_served_model
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import load
from rjax.models import BUNDLED_MODEL, resolve_folder
from rjax.tokenization import Tokenizer


def test_prompts_share_their_beginning_and_nothing_else():
    one, other = (ServerLoad(3).prompts(seed) for seed in (1, 2))
    assert {len(ids) for ids in one} == {SHARED + UNIQUE}
    assert len({tuple(ids[:SHARED]) for ids in one + other}) == 1
    assert len({tuple(ids[SHARED:]) for ids in one + other}) == 6


def test_chats_have_about_as_many_tokens_as_completions():
    tokens = Tokenizer(resolve_folder(BUNDLED_MODEL))
    for arrival in ServerLoad(2, chat=True, tools=True).arrivals(1):
        system, question = arrival.body["messages"]
        assert len(tokens.encode(system["content"])) == pytest.approx(SHARED, rel=0.05)
        assert len(tokens.encode(question["content"])) == pytest.approx(UNIQUE, rel=0.1)
        assert len(arrival.body["tools"]) == 3


def test_latencies_are_in_milliseconds():
    found = latencies([(1.0, [1.5, 1.6, 1.8]), (1.0, [1.7])])
    assert found["ttft_ms_p50"] == pytest.approx(600)
    assert found["ttft_ms_max"] == pytest.approx(700)
    assert (found["gap_ms_p50"], found["gap_ms_max"]) == pytest.approx((150, 200))


def test_every_token_of_a_served_model_has_a_text(tmp_path):
    write_served_model("qwen3-0.6b", tmp_path)
    size = SHAPES["qwen3-0.6b"]["vocab_size"]
    tokens = Tokenizer(tmp_path)
    texts = [tokens.decode([token]) for token in (300, 2048, size // 2, size - 1)]
    assert all(texts) and len(set(texts)) == len(texts)
    text = "Why is the sky blue?"
    assert tokens.encode(text) == Tokenizer(resolve_folder(BUNDLED_MODEL)).encode(text)


@pytest.mark.slow  # starts an engine, and a server
def test_a_run(tmp_path):
    kept = tmp_path / "server_share.json"
    given = f"--json {kept} --shapes tiny --streams 2 4 --max-tokens 4 --clients 1"
    server_share.main(given.split())
    found = load(kept)
    rows = {(row["work"], row["streams"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * (2 + len(server_share.WORKS))
    assert all(np.isfinite(row["tokens_per_s"]) for row in rows.values())
    assert rows["completions", 4]["share"] > 0
    assert found["ceilings"]["copy"] > 0
