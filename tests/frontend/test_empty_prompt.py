"""An empty text is the BOS token alone; a tokenizer that adds none refuses it."""

import json
import pathlib

import pytest

from rjax.api.llm import LLM
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from tests.serve.hostile import ask
from tests.serve.live_server import live_server, make_engine, write_model

from .conftest import TINY_OPTIONS
from .test_real_engine import CONFIG
from .tiny_tokenizers import KINDS, save

pytestmark = pytest.mark.usefixtures("kept")

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def test_offline(tiny_llm: LLM) -> None:
    bos = tiny_llm.get_tokenizer().bos_token_id
    for prompt in ("", {"prompt": ""}):
        (output,) = tiny_llm.generate(prompt, PARAMS)
        assert output.prompt_token_ids == [bos]
        assert len(output.outputs[0].token_ids) == 2
    rows = [output.prompt_token_ids for output in tiny_llm.generate(["", "a"], PARAMS)]
    assert rows == [[bos], tiny_llm.get_tokenizer().encode("a")]
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        tiny_llm.generate({"prompt_token_ids": []}, PARAMS)


def test_offline_without_bos(tmp_path: pathlib.Path) -> None:
    save(KINDS["byte_level"](), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    with LLM(str(tmp_path), **TINY_OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match="the prompt is empty, and the tokenizer"):
            llm.generate("", PARAMS)
        (output,) = llm.generate("a", PARAMS)
        assert output.finished


@pytest.mark.thorough
def test_over_http(tmp_path: pathlib.Path) -> None:
    with live_server(make_engine(write_model(tmp_path))) as server:

        def complete(prompt: object, **fields: object):
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
            return ask(server, "POST", "/v1/completions", body)

        for prompt, tokens in (("", 1), (["", ""], 2), ([1], 1)):
            answer = complete(prompt)
            assert answer.status == 200, answer.json
            assert answer.json["usage"]["prompt_tokens"] == tokens
        assert complete("").json["choices"] == complete([1]).json["choices"]
        answer = complete("", echo=True, logprobs=1)
        assert answer.status == 200, answer.json
        assert len(answer.json["choices"][0]["logprobs"]["tokens"]) == 3
        assert answer.json["choices"][0]["text"] == complete("").json["choices"][0]["text"]
        for prompt, fields in (
            (" ", {}),
            ("", {"add_special_tokens": False}),
            ([], {}),
            ([[]], {}),
        ):
            answer = complete(prompt, **fields)
            assert answer.status == (200 if prompt == " " else 400)
            if answer.status == 400:
                assert "empty" in answer.json["error"]["message"]
        answer = ask(server, "POST", "/tokenize", {"prompt": ""})
        assert answer.json["tokens"] == [1]
