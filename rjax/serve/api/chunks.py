"""The server-sent events of streamed chunks, composed from text.

A chunk's text is that of its model in `rjax.serve.protocol.responses`, byte for byte; tests hold
it.
"""

from collections.abc import Mapping
from json.encoder import encode_basestring as json_string
from typing import Any, ClassVar

import pydantic_core

from rjax.serve.http.chunked_json import iter_json

_NULL = "null"
_PLAIN_END = (
    ',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null,'
    '"prompt_token_ids":null,"prompt_logprobs":null}]}\n\n'
)


def json_text(value: Any) -> str:
    """A value of plain types as JSON, as pydantic writes it."""
    return _NULL if value is None else pydantic_core.to_json(value).decode()


class UsageCounter:
    """Counts the tokens of a request's prompts and samples."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._prompt_tokens = 0
        self._cached = 0
        self._generated = 0

    def add(self, index: int, prompt_tokens: int, cached: int, generated: int) -> None:
        """Count an output: every output of a stream, otherwise only the last one.

        Args:
            index: index of the prompt.
            prompt_tokens: number of tokens in the prompt.
            cached: number of these tokens that were cached.
            generated: number of tokens that were not counted before and that the response shows.
        """
        found = prompt_tokens, cached
        known = self._prompts.get(index)
        if known != found:
            if known is not None:
                self._prompt_tokens -= known[0]
                self._cached -= known[1]
            self._prompts[index] = found
            self._prompt_tokens += prompt_tokens
            self._cached += cached
        self._generated += generated

    def usage(self, reasoning: int = 0) -> dict[str, Any]:
        """The fields of `UsageInfo` so far; ``reasoning`` generated tokens are reasoning."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


class _Chunks:
    """The parts that the chunks of both routes share.

    Args:
        id, created, model: fields of every chunk.
    """

    kind: ClassVar[str]
    content: ClassVar[str]  # name of what a choice has

    def __init__(self, *, id: str, created: int, model: str) -> None:
        self._head = (
            f'data: {{"id":{json_string(id)},"object":"{self.kind}","created":{created},'
            f'"model":{json_string(model)},"choices":['
        )
        self._starts: dict[int, str] = {}

    def _start(self, index: int) -> str:
        """A chunk up to the content of a choice."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = f'{self._head}{{"index":{index},"{self.content}":'
        return start

    def usage(self, usage: Mapping[str, Any]) -> str:
        """The chunk after the last choice."""
        return f"{self._head}]{_usage(usage)}}}\n\n"


class CompletionChunks(_Chunks):
    """Chunks of a stream of /v1/completions."""

    kind, content = "text_completion", "text"

    def text(self, index: int, text: str) -> str:
        """A chunk with nothing but the text of a choice."""
        return f"{self._start(index)}{json_string(text)}{_PLAIN_END}"

    def choice(
        self, fields: Mapping[str, Any], usage: Mapping[str, Any] | None, *, large: bool = False
    ) -> str:
        """A chunk with further fields.

        Args:
            fields: all fields of `CompletionResponseChoice`, in order.
            usage: fields of `UsageInfo` so far; None leaves the field out.
            large: the fields are large, so that other threads must run in between.
        """
        choice = "".join(iter_json(fields)) if large else json_text(fields)
        return f"{self._head}{choice}]{_usage(usage)}}}\n\n"


class ChatChunks(_Chunks):
    """Chunks of a stream of /v1/chat/completions, which hold the fields that are set."""

    kind, content = "chat.completion.chunk", "delta"

    def text(self, index: int, text: str) -> str:
        """A chunk with nothing but new content of a choice."""
        delta = f'{{"content":{json_string(text)}}}'
        return f'{self._start(index)}{delta},"logprobs":null,"finish_reason":null}}]}}\n\n'

    def choice(
        self,
        index: int,
        delta: str,
        *,
        logprobs: Any = None,
        finish_reason: str = _NULL,
        stop_reason: int | str | None = None,
        token_ids: list[int] | None = None,
        usage: Mapping[str, Any] | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> str:
        """A chunk of one choice.

        Args:
            index: index of the choice.
            delta: JSON of the delta.
            finish_reason: JSON of the finish reason.
            logprobs, stop_reason, token_ids: fields of `ChatCompletionResponseStreamChoice`.
            usage, prompt_token_ids: fields of `ChatCompletionStreamResponse`.
        """
        text = (
            f'{self._start(index)}{delta},"logprobs":{json_text(logprobs)},'
            f'"finish_reason":{finish_reason}'
        )
        if stop_reason is not None:
            text += f',"stop_reason":{json_text(stop_reason)}'
        if token_ids is not None:
            text += f',"token_ids":{json_text(token_ids)}'
        text += f"}}]{_usage(usage)}"
        if prompt_token_ids is not None:
            text += f',"prompt_token_ids":{json_text(prompt_token_ids)}'
        return text + "}\n\n"


def _usage(usage: Mapping[str, Any] | None) -> str:
    return "" if usage is None else f',"usage":{json_text(usage)}'
