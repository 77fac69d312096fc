"""Checks of chat messages and template variables."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rjax.errors import InvalidRequestError


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages for a chat template: objects with a role and a content.

    A content given as a list of ``{"type": "text", "text": ...}`` parts is joined to one text.
    Other parts, such as images and audio, are not supported.

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
    if content is None and message.get("tool_calls"):
        return dict(message)
    if isinstance(content, str):
        return dict(message)
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequestError(
                    f"messages[{i}] has a content part of type {kind!r}; only text is read"
                )
            texts.append(text)
        return {**message, "content": "".join(texts)}
    raise InvalidRequestError(
        f"messages[{i}] has a content of type {type(content).__name__}; give a string or a list "
        "of text parts"
    )


def check_template_kwargs(kwargs: Mapping[str, Any], apply: Any) -> dict[str, Any]:
    """Variables for the template, which may not set parameters of the renderer.

    Raises:
        InvalidRequestError: a key is a parameter of the renderer.
    """
    own = {name for name in inspect.signature(apply).parameters if name != "kwargs"}
    for key in kwargs:
        if not isinstance(key, str) or key in own:
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {key!r}, a setting of the renderer and not a "
                "variable of the template"
            )
    return dict(kwargs)
