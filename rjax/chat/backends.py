"""Backends of the chat: a model in this process, or a server."""

import contextlib
import dataclasses
import http.client
import json
import signal
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rjax.errors import InvalidConfigError, InvalidRequestError, RjaxError
from rjax.sampling import RequestOutputKind, SamplingParams

type Messages = Sequence[Mapping[str, str]]


class Reasoning(str):
    """A piece of the model's reasoning."""

    __slots__ = ()


class ServerError(RjaxError):
    """The server refused a request or closed the connection."""


@dataclasses.dataclass(slots=True)
class ResponseStats:
    """Tokens and times of one answer; times are in seconds since the question."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: float | None = None
    seconds: float = 0.0
    stopped: bool = False

    def line(self) -> str:
        """The statistics as one line of text."""
        parts = [f"{self.tokens} tokens"]
        if self.first is not None and self.tokens > 1 and self.seconds > self.first:
            parts.append(f"{(self.tokens - 1) / (self.seconds - self.first):.1f} tokens/s")
        if self.first is not None:
            parts.append(f"first after {self.first * 1000:.0f} ms")
        if self.prompt_tokens:
            parts.append(f"prompt {self.prompt_tokens} tokens, {self.cached_tokens} cached")
        return ", ".join(parts)


@runtime_checkable
class ChatBackend(Protocol):
    """Answers one conversation at a time.

    Attributes:
        name: the model's name.
        sampling: values that override the model's defaults; see `set_sampling`.
    """

    name: str
    sampling: Mapping[str, Any]

    def set_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Replace the sampling values, for the next answers.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        ...

    def answer(self, messages: Messages, stats: ResponseStats) -> Iterator[str]:
        """Stream the pieces of the answer and fill in ``stats``. A `Reasoning` is a piece before
        the answer, which the next request does not repeat.

        Ctrl-C ends the answer early and sets ``stats.stopped``.

        Raises:
            RjaxError: the conversation cannot be answered.
        """
        ...


class LocalBackend:
    """A model in this process.

    Args:
        engine: the engine, with a tokenizer that has a chat template.
        name: the model's name.
        sampling: values that override the model's defaults.
        stoppable: whether Ctrl-C ends an answer; otherwise the process handles the signal.
    """

    sampling: Mapping[str, Any]

    def __init__(
        self, engine: Any, name: str, sampling: Mapping[str, Any], *, stoppable: bool = True
    ) -> None:
        tokenizer = engine.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise InvalidConfigError(
                "the model has no chat template; give one with --chat-template"
            )
        self.name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._number = 0
        self._stoppable = stoppable
        self.set_sampling(sampling)

    def set_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Replace the sampling values, for the next answers."""
        values = {"max_tokens": None, **self._tokenizer.generation.sampling, **sampling}
        self._params = SamplingParams.from_options(
            {**values, "output_kind": RequestOutputKind.DELTA}
        )
        self.sampling = dict(sampling)

    def answer(self, messages: Messages, stats: ResponseStats) -> Iterator[str]:
        """The pieces of the answer."""
        start = time.monotonic()
        text = self._tokenizer.apply_chat_template(list(messages))
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self._number += 1
        name = f"answer-{self._number}"
        # A step must not be interrupted, so Ctrl-C only sets a flag.
        with _interrupts() if self._stoppable else contextlib.nullcontext() as asked:
            self._engine.add_request(name, tokens, self._params)
            try:
                finished = False
                while not finished and not asked:
                    for output in self._engine.step():
                        if output.request_id != name:
                            continue
                        [completion] = output.outputs
                        if completion.token_ids and stats.first is None:
                            stats.first = time.monotonic() - start
                        stats.prompt_tokens = len(tokens)
                        stats.cached_tokens = output.num_cached_tokens
                        stats.tokens += len(completion.token_ids)
                        stats.seconds = time.monotonic() - start
                        finished = output.finished
                        yield completion.text
                stats.stopped = not finished
            finally:
                self._engine.abort_request(name)
                while self._engine.has_unfinished_requests():
                    self._engine.step()


class RemoteBackend:
    """A server that speaks OpenAI's API.

    Args:
        url: URL of the server, with or without a trailing ``/v1``.
        model: the model's name; None takes the server's first model.
        key: API key, or None.
        sampling: sampling fields of the requests.

    Raises:
        InvalidConfigError: the URL is invalid.
        ServerError: the server cannot be reached.
    """

    def __init__(
        self, url: str, model: str | None, key: str | None, sampling: Mapping[str, Any]
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfigError(f"--url is {url!r}; give one such as http://127.0.0.1:8000/v1")
        self._parts = parts
        path = parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else path + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.sampling: Mapping[str, Any] = dict(sampling)
        self.name = model or self._first_model()

    def set_sampling(self, sampling: Mapping[str, Any]) -> None:
        """Replace the sampling values, for the next answers."""
        self.sampling = dict(sampling)

    def answer(self, messages: Messages, stats: ResponseStats) -> Iterator[str]:
        """The pieces of the answer."""
        body = {
            **self.sampling,
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.monotonic()
        with contextlib.closing(self._connect()) as link:
            try:
                response = self._ask(link, "POST", "/chat/completions", body)
                for event in _events(response):
                    if "error" in event:
                        raise ServerError(str(event["error"].get("message", event["error"])))
                    usage = event.get("usage") or {}
                    if usage:
                        details = usage.get("prompt_tokens_details") or {}
                        stats.prompt_tokens = usage.get("prompt_tokens", 0)
                        stats.cached_tokens = details.get("cached_tokens") or 0
                        stats.tokens = usage.get("completion_tokens", stats.tokens)
                    for piece in _pieces(event):
                        if stats.first is None:
                            stats.first = time.monotonic() - start
                        stats.tokens += not usage
                        stats.seconds = time.monotonic() - start
                        yield piece
            except KeyboardInterrupt:
                stats.stopped = True
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the server broke off: {error}") from error

    def _first_model(self) -> str:
        with contextlib.closing(self._connect()) as link:
            try:
                found = json.loads(self._ask(link, "GET", "/models", None).read())
                return found["data"][0]["id"]
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"no server at {self._parts.geturl()}: {error}") from error
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError("the server lists no models; give --model") from error

    def _connect(self) -> http.client.HTTPConnection:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = self._parts.hostname
        assert host is not None
        return kind(host, self._parts.port, timeout=600)

    def _ask(
        self, link: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        link.request(method, self._base + path, content, self._headers)
        response = link.getresponse()
        if response.status != 200:
            text = response.read(10_000).decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, LookupError, TypeError):
                text = text.strip() or response.reason
            if response.status == 400:
                raise InvalidRequestError(text)
            raise ServerError(f"the server answered {response.status}: {text}")
        return response


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    """The reasoning and the text in an event of a stream."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning") or delta.get("reasoning_content")
        if reasoning:
            yield Reasoning(reasoning)
        if delta.get("content"):
            yield delta["content"]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            found = json.loads(data)
            if isinstance(found, dict):
                yield found


@contextlib.contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Collect Ctrl-C signals in a list inside the block."""
    asked: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
