"""LLM's named prefixes, salts, time limits and beam search over the real engine."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from rjax import LLM, BeamSearchParams, SamplingParams
from rjax.errors import InvalidConfigError, InvalidRequestError

from .test_real_engine import CONFIG
from .tiny_tokenizers import KINDS, save

pytestmark = pytest.mark.usefixtures("kept")

GREEDY = SamplingParams(temperature=0, max_tokens=4)
SYSTEM = "Name: Ann Lee, age: 41, country: Peru. "
USERS = ["How old is Ann?", "Where is Bo?"]


def start(folder, **options) -> LLM:
    settings = {
        "load_format": "dummy",
        "page_size": 8,
        "num_pages": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "use_tqdm": False,
    }
    return LLM(str(folder), **(settings | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    save(KINDS["byte_level_bos"](), folder)
    config = CONFIG | {"max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return start(folder)


@pytest.mark.slow
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_saved_prefix_serves_texts_and_ids_at_the_next_start(folder, llm, tmp_path):
    text, ids = tmp_path / "text.safetensors", tmp_path / "ids.safetensors"
    llm.add_prefix("table", SYSTEM, cache_salt="mine")
    llm.add_prefix("numbers", [5, 6, 7, 8, 9, 10, 11, 12, 13])
    llm.save_prefix("table", text)
    llm.save_prefix("numbers", ids)
    want = llm.generate(USERS, GREEDY, prefix="table", use_tqdm=False)

    later = start(folder, prefix_files=(str(text),))
    assert later.load_prefix(ids, "other") == "other"
    assert later.prefixes() == ["table", "other"]
    assert later.stats().steps == 0, "nothing is computed"
    assert later.load_prefix(text, cache_salt="yours") == "table"
    got = later.generate(USERS, GREEDY, prefix="table", use_tqdm=False)
    for found, like in zip(got, want, strict=True):
        assert found.prompt_token_ids == like.prompt_token_ids
        assert found.outputs[0].token_ids == like.outputs[0].token_ids
        assert found.num_cached_tokens == like.num_cached_tokens > 8
    after = later.generate([[14]], GREEDY, prefix="other", use_tqdm=False)[0]
    assert after.prompt_token_ids == [*range(5, 15)]
    assert after.num_cached_tokens == 9
    computed = llm.generate([[14]], GREEDY, prefix="numbers", use_tqdm=False)[0]
    assert computed.outputs[0].token_ids == after.outputs[0].token_ids
    again = tmp_path / "again.safetensors"
    later.save_prefix("table", again)
    first, second = load_file(text), load_file(again)
    assert sorted(first) == sorted(second) == ["kv", "tokens"]
    for name, found in first.items():
        np.testing.assert_array_equal(second[name], found)

    with pytest.raises(InvalidRequestError, match="no prefix is named 'none'"):
        llm.save_prefix("none", text)
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        llm.save_prefix("numbers", tmp_path / "nowhere" / "file")
    with pytest.raises(InvalidRequestError, match="1 to 256"):
        llm.load_prefix(ids, "")
    with pytest.raises(InvalidConfigError, match="cannot be read"):
        llm.load_prefix(tmp_path / "nothing")
    with pytest.raises(InvalidConfigError, match="model"):
        start(folder, seed=1, prefix_files=(str(text),))


def test_a_saved_text_of_another_layout_is_refused(folder, llm, tmp_path):
    path = tmp_path / "laid out"
    llm.add_prefix("table", SYSTEM)
    llm.save_prefix("table", path)
    later = start(folder, sys_schema="<<{__SYS_PROMPT}>>{__USR_PROMPT}")
    later.load_prefix(path)
    with pytest.raises(InvalidRequestError, match="another sys_schema or tokenizer"):
        later.generate(USERS, GREEDY, prefix="table", use_tqdm=False)
    named = later.engine.prefixes()[0]  # a caller that makes tokens itself is served all the same
    ids = [*named.token_ids, 9]
    assert later.generate([ids], GREEDY, use_tqdm=False)[0].num_cached_tokens == len(ids) - 1


def test_a_beam_search_takes_priorities_and_a_bar(llm, monkeypatch):
    bars, priorities = [], set()

    class Bar:
        def __init__(self, total: int, **given: object) -> None:
            self.total, self.done, self.open, self.postfix = total, 0, True, ""
            bars.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.open = False

    add_request = llm.engine.add_request

    def add(request_id: str, tokens: list[int], params: SamplingParams, **given: int) -> None:
        priorities.add((request_id.split("-")[1], given["priority"]))
        add_request(request_id, tokens, params, **given)

    params = BeamSearchParams(beam_width=2, max_tokens=3)
    wanted = llm.beam_search(USERS, params)
    monkeypatch.setattr(llm.engine, "add_request", add)
    order = [5 - i for i in range(len(USERS))]
    found = llm.beam_search(USERS, params, use_tqdm=Bar, priority=order)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert priorities == {(str(i), given) for i, given in enumerate(order)}
    [bar] = bars
    assert (bar.total, bar.done, bar.open) == (len(USERS), len(USERS), False)
    with pytest.raises(InvalidRequestError, match="1 priorities for"):
        llm.beam_search(USERS, params, priority=[1])
