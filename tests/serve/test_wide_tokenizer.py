"""A tokenizer with more tokens than the model has logits, as Gemma 3's smallest."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from rjax.sampling.structured_outputs import StructuredOutputsParams

from .hostile import SHORT, ask, get
from .live_server import CONFIG, LiveServer, live_server, make_engine, write_model

pytestmark = pytest.mark.usefixtures("kept")

BEYOND = [f"<|beyond {i}|>" for i in range(40)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = write_model(tmp_path_factory.mktemp("wide") / "tiny")
    path = str(folder / "tokenizer.json")
    rust = tokenizers.Tokenizer.from_file(path)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": rust.get_vocab_size()}))
    rust.add_special_tokens(BEYOND)
    rust.save(path)
    with live_server(make_engine(folder)) as found:
        yield found
        assert get(found, "/health").json == {"status": "ready"}


def complete(server: LiveServer, **fields: object) -> str:
    answer = ask(server, "POST", "/v1/completions", {**SHORT, **fields})
    assert answer.status == 200, answer.json
    return answer.json["choices"][0]["text"]


@pytest.mark.thorough
def test_it_serves(server: LiveServer) -> None:
    assert server.service.tokenizer.vocab_size == server.service.alternatives.vocab_size + len(
        BEYOND
    )
    assert complete(server)
    shown = complete(server, structured_outputs={"regex": "[ab]{3}"}, max_tokens=9, temperature=1)
    assert re.fullmatch("[ab]{3}", shown)


def test_parameters_of_such_tokens_are_ignored_or_refused(server):
    free, first = complete(server), server.service.alternatives.vocab_size
    for words in (BEYOND[:1], [BEYOND[-1], "a" + BEYOND[3]]):
        assert complete(server, bad_words=words) == free
    shown = [complete(server, bad_words=[BEYOND[0], free[:k]]) for k in (1, 2, 3, 4)]
    assert any(text != free for text in shown)
    for token in (first, first + len(BEYOND) - 1):
        for fields in (
            {"logit_bias": {str(token): 5}},
            {"stop_token_ids": [token]},
            {"allowed_token_ids": [token, 1]},
            {"prompt": [token]},
            {"prompt": f"a{BEYOND[token - first]}"},
            {"structured_outputs": {"grammar": f"start: <[{token}]>"}},
        ):
            answer = ask(server, "POST", "/v1/completions", {**SHORT, **fields})
            assert answer.status == 400, fields
            assert "\n" not in answer.json["error"]["message"]
    assert complete(server) == free


def test_no_mask_allows_such_a_token(server):
    wanted = StructuredOutputsParams(grammar="start: /(.|\\n)*/")
    params = SamplingParams(structured_outputs=wanted)
    (mask,) = server.call(lambda engine: engine.structured_masks(params))
    size = server.service.alternatives.vocab_size
    for token in (65, 66):
        assert mask.bitmask.shape == (-(-size // 32),)
        bits = np.unpackbits(mask.bitmask.view(np.uint8), bitorder="little")
        assert bits[:size].any()
        assert not bits[size:].any()
        mask.accept(token)


@pytest.mark.thorough
def test_ends_that_no_logit_has_leave_no_grammar(server, tmp_path):
    folder = Path(server.service.tokenizer.folder)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": BEYOND[5]}))
    with live_server(make_engine(tmp_path)) as other:
        assert complete(other, min_tokens=2)
        body = {**SHORT, "structured_outputs": {"regex": "a"}}
        answer = ask(other, "POST", "/v1/completions", body)
        assert answer.status == 400
        assert "end-of-sequence token" in answer.json["error"]["message"]
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        with pytest.raises(InvalidRequestError, match="end-of-sequence token"):
            other.call(lambda engine: engine.structured_masks(params))
