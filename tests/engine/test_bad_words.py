"""Bad words are not said, at the beginning or after a space, and nothing else is kept back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.engine.bad_words import BadWordsMask
from rjax.engine.llm_engine import LLMEngine
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from tests.serve.live_server import make_engine, write_model

from .tiny import run

pytestmark = pytest.mark.usefixtures("kept")

V = 7


@given(
    st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), min_size=1, max_size=5),
    st.lists(st.integers(0, V - 1), max_size=8),
)
def test_a_token_is_forbidden_where_it_would_complete_a_sequence(sequences, said):
    mask = BadWordsMask(sequences, V)
    for count in range(len(said) + 1):
        bits = np.unpackbits(mask.bitmask.view(np.uint8), bitorder="little")[:V]
        for token in range(V):
            text = [*said[:count], token]
            ends = any(text[-len(s) :] == s for s in sequences)
            assert bits[token] == (not ends)
        if count < len(said):
            mask.accept(said[count])


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> LLMEngine:
    return make_engine(write_model(tmp_path_factory.mktemp("bad words") / "tiny"))


@pytest.mark.thorough
def test_what_was_said_is_not_said_again(engine):
    prompt = engine.tokenizer.encode("Who lives in Peru?")
    params = SamplingParams(n=3, seed=4, max_tokens=24, ignore_eos=True)
    before = run(engine, [("free", prompt, params)])["free"].outputs
    # Words of several tokens, and of one.
    words = [before[0].text[4:9], before[1].text[:3], engine.tokenizer.token_text(60).strip()]
    held = SamplingParams(
        n=3, seed=4, max_tokens=24, ignore_eos=True, bad_words=[w for w in words if w.strip()]
    )
    done = run(engine, [("held", prompt, held), ("beside", prompt, params)])
    assert [o.text for o in done["beside"].outputs] == [o.text for o in before]
    found = [o.token_ids for o in done["held"].outputs]
    assert found != [o.token_ids for o in before]
    assert all(len(tokens) == 24 for tokens in found)
    for word in held.bad_words:
        tokens = engine.tokenizer.encode(word.lstrip(), add_special_tokens=False)
        for said in found:
            runs = [said[i : i + len(tokens)] for i in range(len(said))]
            assert tokens not in runs


def test_bad_words_that_cannot_be(engine):
    def refused(message: str, **more) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            engine.add_request("bad", [5], SamplingParams(max_tokens=2, **more))

    [token] = engine.tokenizer.encode("a", add_special_tokens=False)
    refused("no token", bad_words=["a"], allowed_token_ids=[token])
    refused("hold no token", bad_words=[" "])
    params = SamplingParams(max_tokens=2, bad_words=["a"])
    with pytest.raises(InvalidRequestError, match="exclude one another"):
        engine.add_request("bad", [5], params, masks=[BadWordsMask([[1]], 8)])
    assert not engine.has_unfinished_requests()
