"""Parts with images, audio, video and files are refused by name on every route with messages."""

import json
from typing import Any

import pytest

from rjax.serve.api.bodies import parse_body
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.protocol.requests import ChatCompletionRequest, RequestModel, TokenizeRequest
from rjax.serve.protocol.responses_api_requests import ResponsesRequest

URL = "http://example.com/a"
TEXT = {"type": "text", "text": "What is this?"}
INPUT_TEXT = {"type": "input_text", "text": "What is this?"}
CHAT_PARTS = [
    ({"type": "image_url", "image_url": {"url": URL}}, "an image"),
    ({"type": "image", "image": URL}, "an image"),
    ({"type": "image_embeds", "image_embeds": "aa"}, "an image"),
    ({"type": "input_image", "image_url": URL}, "an image"),
    ({"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}}, "audio"),
    ({"type": "audio_url", "audio_url": {"url": URL}}, "audio"),
    ({"type": "video_url", "video_url": {"url": URL}}, "video"),
    ({"type": "file", "file": {"file_id": "f"}}, "a file"),
]
RESPONSE_PARTS = [
    ({"type": "input_image", "image_url": URL, "detail": "auto"}, "an image"),
    ({"type": "input_audio", "input_audio": {"data": "aa", "format": "mp3"}}, "audio"),
    ({"type": "input_file", "file_id": "f"}, "a file"),
]


def refusal(kind: type[RequestModel], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(body).encode(), kind, ServeLimits(), UnknownFields())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(("part", "media"), CHAT_PARTS)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, TokenizeRequest])
def test_parts_of_messages(kind: type[RequestModel], part: dict[str, Any], media: str) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [TEXT, part]}]
    found = refusal(kind, {"messages": messages})
    assert found.param == "messages.1.content.1"
    assert found.message == (
        f"messages.1.content.1 is of the type '{part['type']}', {media}: this server takes text "
        "only"
    )
    assert found.code == "unsupported_parameter"


@pytest.mark.parametrize(("part", "media"), RESPONSE_PARTS)
def test_parts_of_inputs(part: dict[str, Any], media: str) -> None:
    found = refusal(ResponsesRequest, {"input": [{"role": "user", "content": [INPUT_TEXT, part]}]})
    assert found.param == "input.0.message.content.1"
    assert f"'{part['type']}', {media}: this server takes text only" in found.message
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    found = refusal(ResponsesRequest, {"input": [output]})
    assert found.param == "input.0.function_call_output.output.0"
    assert f"'{part['type']}', {media}: this server takes text only" in found.message


def test_a_part_without_a_type_and_one_of_another() -> None:
    found = refusal(
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": [{"image_url": {"url": URL}}]}]},
    )
    assert found.message.endswith("this server takes text only, and fetches nothing")
    found = refusal(
        ChatCompletionRequest,
        {"messages": [{"role": "user", "content": [{"type": "odd", "text": "a"}]}]},
    )
    assert found.param == "messages.0.content.0.type"
