"""How models write tool calls, and the grammars that force one."""

import dataclasses
import json
from typing import Any

from rjax.errors import InvalidConfigError
from rjax.serve.requests import Tool
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write a call.

    Attributes:
        name: for the command line.
        begin, end: what stands before and after the JSON of a call.
        arguments: its key for the arguments; the function's name has the key "name".
        separator: between two calls.
        anywhere: whether text may stand before a call. If not, only an answer that begins with
            ``begin``, or with an object, is calls.
    """

    name: str
    begin: str
    end: str
    arguments: str
    separator: str
    anywhere: bool

    def call_text(self, name: str, arguments: str) -> str:
        """A call as the model would write it."""
        return (
            f'{self.begin}{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}{self.end}'
        )

    def grammar(self, tools: list[Tool], *, several: bool) -> str:
        """A Lark grammar of one call (or more) of these functions, arguments by their schemas."""
        schemas = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    self.arguments: tool.function.parameters or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        call = "(" + " | ".join(f"call_{i}" for i in range(len(schemas))) + ")"
        parts = [part for part in (_quoted(self.begin), call, _quoted(self.end)) if part]
        rules = [f"one: {' '.join(parts)}"]
        again = f" ({_quoted(self.separator)} one)*" if several else ""
        rules.append(f"start: one{again}")
        # The object is written without free white space, which a weak model could go on with.
        options: dict[str, Any] = {
            "x-guidance": {
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            }
        }
        rules += [
            f"call_{i}: %json {json.dumps(options | schema)}" for i, schema in enumerate(schemas)
        ]
        return "\n".join(rules)


HERMES = ToolFormat(
    name="hermes",
    begin="<tool_call>\n",
    end="\n</tool_call>",
    arguments="arguments",
    separator="\n",
    anywhere=True,
)
LLAMA3 = ToolFormat(
    name="llama3",
    begin="",
    end="",
    arguments="parameters",
    separator="; ",
    anywhere=False,
)
FORMATS = {fmt.name: fmt for fmt in (HERMES, LLAMA3)}


def choose_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """The format of that name; "auto" is Llama's for a template that speaks of its tags.

    Raises:
        InvalidConfigError: an unknown name.
    """
    if name == "auto":
        template = str(tokenizer.hf.chat_template or "")
        llama = "<|python_tag|>" in template or "<|start_header_id|>" in template
        return LLAMA3 if llama else HERMES
    if name not in FORMATS:
        raise InvalidConfigError(
            f"the tool format is {name!r}; choose one of auto, {', '.join(FORMATS)}"
        )
    return FORMATS[name]


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
