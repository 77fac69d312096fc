"""Convert messages and tools to the input of a chat template."""

import json
from typing import Any

from rjax.errors import InvalidRequestError
from rjax.serve.parsing.tools.base import ToolFormat
from rjax.serve.parsing.tools.registry import knows_tools
from rjax.serve.protocol.requests import Message, Tool
from rjax.tokenization import Tokenizer
from rjax.tokenization.content_form import join_parts

_INTRODUCTION = (
    "You may call these functions, each described by a JSON schema:\n{functions}\n"
    "To call one, answer with its name and arguments in this form and nothing else:\n{example}"
)


def tools_for_template(tools: list[Tool], tokenizer: Tokenizer) -> list[dict[str, Any]] | None:
    """The ``tools`` argument of the template; None if `conversation` describes the tools."""
    if not tools or not knows_tools(tokenizer):
        return None
    return [tool.model_dump(exclude_none=True) for tool in tools]


def conversation(
    messages: list[Message], tools: list[Tool], tokenizer: Tokenizer, fmt: ToolFormat | None
) -> list[dict[str, Any]]:
    """Messages for the template.

    The role ``developer`` becomes ``system``, its older name, which templates support. If the
    template does not support tools, they are described in the system message, calls become text of
    the assistant, and results become user messages.

    Args:
        messages, tools: the request's messages and tools.
        tokenizer: the model's tokenizer.
        fmt: tool-call format of the model; None is only for templates that support tools.

    Raises:
        InvalidRequestError: a message has invalid reasoning, or the format cannot write its calls.
    """
    describing = None if knows_tools(tokenizer) else fmt
    found: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        becomes_text = describing is not None and (tools or message.tool_calls or role == "tool")
        parts = message.content if isinstance(message.content, list) else None
        entry: dict[str, Any] = {
            "role": role,
            "content": message_text(message)
            if becomes_text or not parts
            else [part.model_dump() for part in parts],
        }
        if message.name is not None:
            entry["name"] = message.name
        entry |= _reasoning(message)
        if describing is None:
            if message.tool_call_id is not None:
                entry["tool_call_id"] = message.tool_call_id
            if message.tool_calls:
                entry["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        elif message.tool_calls:
            calls = describing.calls_text(
                [(call.function.name, call.function.arguments) for call in message.tool_calls]
            )
            entry["content"] = "\n".join(part for part in (entry["content"], calls) if part)
        elif role == "tool":
            entry = {
                "role": "user",
                "content": f"<tool_response>\n{entry['content']}\n</tool_response>",
            }
        found.append(entry)
    if tools and describing is not None:
        _describe(tools, found, describing)
    return found


def message_text(message: Message) -> str:
    """The text of a message, a line for each part, or its refusal if it has no text."""
    if isinstance(message.content, list):
        return join_parts(part.text for part in message.content)
    return message.content or message.refusal or ""


def _reasoning(message: Message) -> dict[str, str]:
    """The reasoning, under every name that templates use."""
    given = {message.reasoning, message.reasoning_content} - {None}
    if not given:
        return {}
    if len(given) > 1:
        raise InvalidRequestError(
            "messages: reasoning and reasoning_content of a message differ; give one of them"
        )
    if message.role != "assistant":
        raise InvalidRequestError(
            f"messages: a {message.role} message has reasoning, which only the assistant's have"
        )
    (text,) = given
    assert text is not None
    names = ["reasoning", "reasoning_content"]
    if not message.content:
        names.append("thinking")  # gpt-oss's name; its template refuses it together with content
    return dict.fromkeys(names, text)


def _describe(tools: list[Tool], messages: list[dict[str, Any]], fmt: ToolFormat) -> None:
    functions = "\n".join(
        json.dumps(tool.function.model_dump(exclude_none=True), ensure_ascii=False)
        for tool in tools
    )
    text = _INTRODUCTION.format(functions=functions, example=fmt.example)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})
