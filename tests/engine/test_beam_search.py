"""Beam search finds what transformers' does, and shares what its beams have in common."""

import json
from pathlib import Path

import pytest

from rjax.api.beam_search import BeamSearchParams, run_beam_search
from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.errors import InvalidRequestError

from .fake_worker import fake_engine

pytestmark = pytest.mark.usefixtures("kept")

GOLDEN = Path(__file__).parents[1] / "golden"
RECORD = json.loads((GOLDEN / "expected" / "beams.json").read_text())


def make(name: str) -> LLMEngine:
    settings = {
        "model": str(GOLDEN / "models" / name),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 64,
        "page_size": 8,
        "num_pages": 24,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 32,
        "use_tqdm": False,
    }
    return build_engine(EngineConfig.from_options(settings))


MODELS = sorted({case["model"] for case in RECORD["cases"]})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "stride"),
    [(MODELS[0], 5), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in MODELS)],
)
def test_beams_are_those_of_transformers(name, stride):
    engine = make(name)
    for case in [case for case in RECORD["cases"] if case["model"] == name][::stride]:
        params = BeamSearchParams(
            beam_width=case["num_beams"],
            max_tokens=RECORD["new_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            stop_token_ids=case["eos"],
        )
        output = run_beam_search(engine, [case["prompt"]], params, "beam")[0]
        assert [o.token_ids for o in output.outputs] == case["tokens"], case
        for found, score in zip(output.outputs, case["scores"], strict=True):
            length = len(found.token_ids)
            assert found.cumulative_logprob is not None
            normed = found.cumulative_logprob / length ** case["length_penalty"]
            assert normed == pytest.approx(score, abs=2e-4)
    assert engine._blocks.counts().used == 0
    # Each round finds all but its last token: hardly more than each token once is computed.
    stats = engine.stats()
    assert stats.pages_copied > 0
    assert stats.hit_rate > 0.8


@pytest.mark.thorough
def test_many_prompts_are_searched_at_once():
    cases = [c for c in RECORD["cases"] if c["model"] == "llama_g7_h64"]
    same = [
        c
        for c in cases
        if {k: c[k] for k in ("num_beams", "early_stopping")}
        == {"num_beams": 2, "early_stopping": False}
        and c["length_penalty"] == 1.0
        and not c["eos"]
    ]
    prompts = [same[0]["prompt"], [1, 2, 3], same[0]["prompt"][:4]]
    params = BeamSearchParams(beam_width=2, max_tokens=RECORD["new_tokens"])
    engine = make("llama_g7_h64")
    together = run_beam_search(engine, prompts, params, "all")
    assert [o.token_ids for o in together[0].outputs] == same[0]["tokens"]
    for prompt, output in zip(prompts, together, strict=True):
        alone = run_beam_search(engine, [prompt], params, "one")[0]
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in output.outputs]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_bad_parameters_are_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        BeamSearchParams(**options)


def test_what_the_engine_cannot_search_is_refused():
    engine = fake_engine(vocab=64, max_model_len=32, num_pages=40)
    with pytest.raises(InvalidRequestError, match="max_logprobs"):
        run_beam_search(engine, [[1]], BeamSearchParams(beam_width=11), "a")
    with pytest.raises(InvalidRequestError, match="max_model_len"):
        run_beam_search(engine, [[1] * 20], BeamSearchParams(max_tokens=16), "a")
    assert not engine.has_unfinished_requests()
