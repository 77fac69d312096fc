"""All formats of tool calls, and chat templates that write them."""

from pathlib import Path
from typing import Any

from rjax.serve.parsing.tools.json_calls import JsonFormat
from rjax.serve.parsing.tools.registry import TOOL_CALL_PARSERS, tool_format
from rjax.serve.protocol.requests import Tool
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER

TOOL_FORMATS = {name: tool_format(name) for name in TOOL_CALL_PARSERS}
JSON_FORMATS = {name: fmt for name, fmt in TOOL_FORMATS.items() if isinstance(fmt, JsonFormat)}
TEMPLATES = Path(__file__).parent / "templates"


def template(name: str) -> str:
    """A chat template with the markers of a family, that writes calls as the family's own does."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def rendered(name: str, calls: list[tuple[str, Any]], content: str = "") -> str:
    """An output with content and calls, as a chat template writes it, without the tag of its end.

    Args:
        name: of the template.
        calls: function names and arguments.
        content: before the calls.
    """
    tokenizer = Tokenizer(TOKENIZER, chat_template=template(name))
    user = {"role": "user", "content": "a"}
    told = [
        {
            "id": f"call00000{i}",
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }
        for i, (function, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": told}
    prompt = tokenizer.apply_chat_template([user])
    text = tokenizer.apply_chat_template([user, answer], add_generation_prompt=False)
    end = tokenizer.apply_chat_template(
        [user, {"role": "assistant", "content": "b"}], add_generation_prompt=False
    ).removeprefix(f"{prompt}b")
    assert end and text.startswith(prompt)
    return text.removeprefix(prompt).removesuffix(end)


def make_tool(name: str, parameters: dict[str, Any] | None, strict: bool | None = None) -> Tool:
    """A function that the model may call."""
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})
