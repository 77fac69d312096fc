"""Whether a chat template takes a message's content as a text or as a list of its parts.

Templates of models with images loop over ``message.content``, many of them also where it is a text.
What a template does is found by rendering two short conversations with it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

type Message = Mapping[str, Any]
type Render = Callable[[list[dict[str, Any]]], str]

_TEXTS = ("first8f2c", "second8f2c")  # of a probe; they stand for any text
_KEY = "text"  # of a part; a template that shows parts has the word in its source
_OTHER = "other8f2c"


@dataclasses.dataclass(frozen=True, slots=True)
class ContentForm:
    """What a template shows of the messages of one role.

    Attributes:
        text: the content may be a text.
        parts: the content may be a list of ``{"type": "text", "text": ...}`` parts.
    """

    text: bool = True
    parts: bool = False

    def of(self, content: str | Sequence[Message]) -> str | list[dict[str, Any]]:
        """The content in a form that the template shows: as it is if it can be.

        Parts that become one text have a line each, as in vLLM.
        """
        if isinstance(content, str):
            return content if self.text or not self.parts else [_part(content)]
        if self.parts:
            return [dict(part) for part in content]
        return join_parts(part["text"] for part in content)


def find_content_form(render: Render, role: str) -> ContentForm:
    """The form of the content of messages with a role.

    Args:
        render: the template with everything but the messages; it may raise anything.
        role: the role; a user message stands beside a message of another role.
    """
    user = ContentForm() if role == "user" else find_content_form(render, "user")

    def shows(content: Any, texts: Sequence[str]) -> bool:
        messages = [{"role": role, "content": content}]
        if role != "user":
            beside = {"role": "user", "content": user.of(_OTHER)}
            messages = [*messages, beside] if role == "system" else [beside, *messages]
        try:
            shown = render(messages)
        except Exception:  # the template refuses it, in any way
            return False
        # A list that is shown as a Python or JSON value has the keys of its parts.
        keys = any(f"{quote}{_KEY}{quote}: " in shown for quote in "'\"")
        return all(text in shown for text in texts) and not keys

    return ContentForm(
        text=shows(_TEXTS[0], _TEXTS[:1]),
        parts=shows([_part(text) for text in _TEXTS], _TEXTS),
    )


class ContentForms:
    """The forms of one template, each found when a message needs it.

    Args:
        source: the template's source.
        render: see `find_content_form`.
    """

    def __init__(self, source: str, render: Render) -> None:
        self._plain = _KEY not in source
        self._render = render
        self._found: dict[str, ContentForm] = {}

    def apply(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with their contents in the template's form."""
        return [
            {**message, "content": self._of(message["role"]).of(message["content"])}
            for message in messages
        ]

    def _of(self, role: str) -> ContentForm:
        if self._plain:
            return ContentForm()
        if role not in self._found:
            self._found[role] = find_content_form(self._render, role)
        return self._found[role]


def join_parts(texts: Iterable[str]) -> str:
    """The text of a message with several text parts, a line for each part as in vLLM."""
    return "\n".join(texts)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
