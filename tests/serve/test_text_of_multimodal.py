"""The text of a multimodal checkpoint through the server and `LLM`, by a template with images."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rjax import LLM, InvalidRequestError, SamplingParams

from .live_server import CONFIG, OPTIONS, LiveServer, live_server, make_engine, write_model

# Takes parts alone, and puts images before the text.
TEMPLATE = """\
{%- for m in messages -%}<{{ m.role }}>
{%- for c in m.content if c.type == 'image' %}<image>{% endfor %}
{%- for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}</>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
TEXT = {"type": "text", "text": "Who lives in Peru?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL with its template in the file of the processor, as older folders have it."""
    found = write_model(tmp_path_factory.mktemp("multimodal") / "tiny")
    text = json.loads((found / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 3,
        "text_config": {**text, "model_type": "qwen3_vl_text"},
        "vision_config": {"depth": 2},
        "tie_word_embeddings": CONFIG["tie_word_embeddings"],
        "dtype": "float32",
    }
    (found / "config.json").write_text(json.dumps(config))
    (found / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with live_server(make_engine(folder, max_num_seqs=2)) as found:
        yield found


def post(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    return httpx2.post(f"{server.url}{path}", json=body, timeout=60)


def test_a_text_and_its_part_are_the_same_prompt(server: LiveServer) -> None:
    prompts = []
    for content in (TEXT["text"], [TEXT]):
        body = {"messages": [{"role": "user", "content": content}]}
        found = post(server, "/tokenize", body).json()["tokens"]
        prompts.append(post(server, "/detokenize", {"tokens": found}).json()["prompt"])
    assert prompts == ["<user>Who lives in Peru?</><assistant>"] * 2
    messages = [{"role": "user", "content": [TEXT]}]
    chat = post(server, "/v1/chat/completions", {"messages": messages, **GREEDY})
    assert chat.status_code == 200
    text = [{"role": "user", "content": [{"type": "input_text", "text": TEXT["text"]}]}]
    response = post(
        server, "/v1/responses", {"input": text, "temperature": 0, "max_output_tokens": 4}
    )
    assert response.status_code == 200
    answer = chat.json()["choices"][0]["message"]["content"]
    assert response.json()["output"][0]["content"][0]["text"] == answer


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]},
         "messages.0.content.1"),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]},
         "messages.0.content.0"),
        ("/v1/prefixes", {"name": "a", "messages": [{"role": "user", "content": [IMAGE]}]},
         "messages.0.content.0"),
        ("/v1/responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
         "input.0.message.content.0"),
    ],
)  # fmt: skip
def test_an_image_is_refused(server: LiveServer, path: str, body: Any, param: str) -> None:
    found = post(server, path, body)
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert error["message"].endswith("an image: this server takes text only")


def test_in_python(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    options: dict[str, Any] = OPTIONS
    with LLM(str(folder), **options) as llm:
        outputs = [
            llm.chat([{"role": "user", "content": content}], params)[0]
            for content in (TEXT["text"], [TEXT])
        ]
        assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="'image_url', an image: models take text"):
            llm.chat([{"role": "user", "content": [TEXT, IMAGE]}], params)
        media = {"image": object()}
        with pytest.raises(InvalidRequestError, match="multi_modal_data: models take text"):
            llm.generate("a", params, multi_modal_data=media)
        with pytest.raises(InvalidRequestError, match="multi_modal_data: models take text"):
            llm.generate({"prompt": "a", "multi_modal_data": media}, params)
        assert "the model also takes images and video" in llm.engine.summary["input"]
