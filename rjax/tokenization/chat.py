"""Checks of chat messages and template variables."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rjax.errors import InvalidRequestError

_IMAGE, _AUDIO, _VIDEO, _FILE = "an image", "audio", "video", "a file"
MEDIA_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("image", "image_embeds", "image_pil", "image_url", "input_image"), _IMAGE),
    **dict.fromkeys(("audio", "audio_embeds", "audio_url", "input_audio"), _AUDIO),
    **dict.fromkeys(("video", "video_url", "input_video"), _VIDEO),
    **dict.fromkeys(("file", "file_url", "input_file"), _FILE),
}
"""What content parts of these types hold; OpenAI's, and those of vLLM and transformers."""


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages for a chat template: objects with a role and a content.

    A content is a text or a list of ``{"type": "text", "text": ...}`` parts. Other parts, such as
    images and audio, are not supported. The content of a message with tool calls may be absent and
    is then empty; their arguments become JSON values.

    Raises:
        InvalidRequestError: a message is invalid; the error names it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequestError(
            f"messages is {type(messages).__name__}; give a list of "
            '{"role": ..., "content": ...} objects'
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(i: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{i}] is {type(message).__name__}; give an object with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"messages[{i}] has the role {role!r}; give one such as 'system', 'user', 'assistant'"
        )
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls:
        content = "" if content is None else content
        message = {**message, "content": content, "tool_calls": list(map(_parse_call, calls))}
    if isinstance(content, str):
        return dict(message)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                media = MEDIA_PARTS.get(kind) if isinstance(kind, str) else None
                raise InvalidRequestError(
                    f"messages[{i}] has a content part of type {kind!r:.100}"
                    + (f", {media}" if media else "")
                    + ": models take text only; give text parts"
                )
            texts.append(text)
        return {**message, "content": [{"type": "text", "text": text} for text in texts]}
    raise InvalidRequestError(
        f"messages[{i}] has a content of type {type(content).__name__}; give a string or a list "
        "of text parts"
    )


def call_arguments(given: object) -> Any:
    """The arguments of a tool call as a JSON value, which templates iterate.

    Absent and empty arguments and the text ``null`` are an empty object. A text of JSON is parsed,
    also one that was encoded twice. Text that is not JSON stays as it is.
    """
    found = given
    for _ in range(2):
        if not isinstance(found, str):
            break
        try:
            found = json.loads(found) if found.strip() else None
        except (ValueError, RecursionError):
            break
    return {} if found is None else found


def _parse_call(call: object) -> object:
    """A tool call with its arguments as a JSON value."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    arguments = call_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def check_template_kwargs(kwargs: Mapping[str, Any], apply: Any) -> dict[str, Any]:
    """Variables for the template, which may not set parameters of the renderer.

    Raises:
        InvalidRequestError: a key is a parameter of the renderer.
    """
    if not kwargs:  # the signature takes longer than a short template
        return {}
    own = {name for name in inspect.signature(apply).parameters if name != "kwargs"}
    for key in kwargs:
        if not isinstance(key, str) or key in own:
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {key!r}, a setting of the renderer and not a "
                "variable of the template"
            )
    return dict(kwargs)
