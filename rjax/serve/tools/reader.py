"""Finds tool calls in an answer while it comes in."""

import dataclasses
import json
import secrets

from rjax.serve.tools.formats import ToolFormat

_DECODER = json.JSONDecoder()
_PYTHON_TAG = "<|python_tag|>"
_MOST_CALLS = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call: an id for the client, the function's name, its arguments as JSON."""

    id: str
    name: str
    arguments: str


class CallReader:
    """Splits the text of one answer into content and calls.

    Content is passed on at once, except for an end that may be the beginning of a call; a call is
    told when it is complete. What looks like a call and is none (broken JSON, an unknown function)
    stays content. Only `json` reads the text.

    Args:
        fmt: how this model writes calls.
        names: functions that may be called.
    """

    def __init__(self, fmt: ToolFormat, names: frozenset[str]) -> None:
        self._format = fmt
        self._names = names
        self._buffer = ""
        self._searched = 0  # so much of the buffer holds no end of the call it begins with
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Take more text; return the content and the calls that are now certain."""
        self._buffer += text
        return self._anywhere() if self._format.anywhere else ("", [])

    def finish(self) -> tuple[str, list[Call]]:
        """The end of the answer: what is left."""
        if self._format.anywhere:
            content, calls = self._anywhere(ended=True)
            content, self._buffer = content + self._buffer, ""
            return content, calls
        return self._whole()

    def _anywhere(self, *, ended: bool = False) -> tuple[str, list[Call]]:
        begin, end = self._format.begin.strip(), self._format.end.strip()
        content: list[str] = []
        calls: list[Call] = []
        while True:
            at = self._buffer.find(begin)
            if at < 0:
                keep = 0 if ended else _open_end(self._buffer, begin)
                cut = len(self._buffer) - keep
                content.append(self._buffer[:cut])
                self._buffer = self._buffer[cut:]
                break
            stop = self._buffer.find(end, max(at, self._searched))
            # Models often end the answer in place of writing the closing tag.
            if stop < 0 and not ended:
                content.append(self._buffer[:at])
                self._buffer = self._buffer[at:]
                self._searched = max(0, len(self._buffer) - len(end) + 1)
                break
            inner = self._buffer[at + len(begin) : stop if stop >= 0 else None]
            rest = self._buffer[stop + len(end) :] if stop >= 0 else ""
            call = self._parse(inner)
            if call is None:
                content.append(self._buffer[: len(self._buffer) - len(rest)])
            else:
                content.append(self._buffer[:at])
                calls.append(call)
                self.num_calls += 1
            self._buffer, self._searched = rest, 0
        text = "".join(content)
        if self.num_calls and not text.strip():
            text = ""  # the line breaks between calls
        return text, calls

    def _whole(self) -> tuple[str, list[Call]]:
        text = self._buffer.strip().removeprefix(_PYTHON_TAG).strip()
        whole, self._buffer = self._buffer, ""
        calls: list[Call] = []
        at = 0
        while at < len(text):
            if text[at] != "{":
                return whole, []
            try:
                _, stop = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return whole, []
            call = self._parse(text[at:stop])
            if call is None:
                return whole, []
            calls.append(call)
            at = stop
            while at < len(text) and text[at] in "; \n\t,":
                at += 1
        self.num_calls = len(calls)
        return ("", calls) if calls else (whole, [])

    def _parse(self, text: str) -> Call | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or self.num_calls >= _MOST_CALLS:
            return None
        name = found.get("name")
        arguments = found.get("arguments", found.get("parameters"))
        if not isinstance(name, str) or name not in self._names:
            return None
        if not isinstance(arguments, dict):
            return None
        return Call(
            f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, ensure_ascii=False)
        )


def _open_end(text: str, marker: str) -> int:
    """Length of the longest end of text that begins the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
