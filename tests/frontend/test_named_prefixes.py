"""LLM's named prefixes, salts, time limits and beam search over the real engine."""

import json

import pytest

from rjax import LLM, BeamSearchParams, SamplingParams
from rjax.errors import InvalidRequestError

from .test_real_engine import CONFIG
from .tiny_tokenizers import KINDS, save

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SYSTEM = "Name: Ann Lee, age: 41, country: Peru. "
USERS = ["How old is Ann?", "Where is Bo?"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    save(KINDS["byte_level_bos"](), folder)
    config = CONFIG | {"max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder),
        load_format="dummy",
        page_size=8,
        num_pages=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        use_tqdm=False,
    )


def test_a_named_text_is_put_before_texts(llm):
    llm.add_prefix("support", SYSTEM)
    llm.add_prefix("ids", [5, 6, 7, 8])
    assert llm.prefixes() == ["support", "ids"]
    named = llm.generate(USERS, GREEDY, prefix="support", use_tqdm=False)
    whole = llm.generate([SYSTEM + user for user in USERS], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in named] == [o.outputs[0].token_ids for o in whole]
    assert [o.prompt_token_ids for o in named] == [o.prompt_token_ids for o in whole]
    assert all(o.num_cached_tokens > 8 for o in named)
    assert [o.prompt for o in named] == USERS
    after = llm.generate([[9, 10]], GREEDY, prefix="ids", use_tqdm=False)[0]
    assert after.prompt_token_ids == [5, 6, 7, 8, 9, 10]
    salted = llm.generate(SYSTEM + USERS[0], GREEDY, cache_salt="other", use_tqdm=False)[0]
    assert salted.num_cached_tokens == 0
    assert salted.outputs[0].token_ids == whole[0].outputs[0].token_ids
    llm.drop_prefix("support")
    assert llm.prefixes() == ["ids"]
    with pytest.raises(InvalidRequestError, match="no prefix is named 'support'; there are: 'ids'"):
        llm.generate(USERS, GREEDY, prefix="support", use_tqdm=False)


def test_time_is_up(llm):
    many = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    output = llm.generate([[1, 2]], many, timeout=0.01, use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "abort"


def test_beams_of_texts(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    outputs = llm.beam_search(USERS, params)
    for user, output in zip(USERS, outputs, strict=True):
        assert output.prompt == user
        assert len(output.outputs) == 3
        for found in output.outputs:
            assert found.text == llm.get_tokenizer().decode(found.token_ids)
    greedy = llm.generate(USERS[0], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]
    narrow = llm.beam_search(USERS[0], BeamSearchParams(beam_width=1, max_tokens=5))[0]
    assert narrow.outputs[0].token_ids == greedy.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="token id 512"):
        llm.beam_search([[512]], params)
