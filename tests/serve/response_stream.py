"""The stream of a response to given deltas; each event has the bytes of its model."""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rjax.outputs import CompletionOutput, RequestOutput
from rjax.serve.api.chat_parts import ChatDelta, ChatParts
from rjax.serve.api.chunks import UsageCounter
from rjax.serve.api.responses.encoder import ResponseEncoder
from rjax.serve.api.responses.record import ResponseRecord
from rjax.serve.protocol import responses_api_models as models
from rjax.serve.protocol.responses import ChatFinishReason
from rjax.serve.protocol.responses_api_requests import ResponsesRequest
from rjax.serve.stores.response_store import ResponseStore

COUNT = UsageCounter()
COUNT.add(0, prompt_tokens=1, cached=0, generated=3)
MODELS = {
    "created": models.ResponseEvent,
    "in_progress": models.ResponseEvent,
    "completed": models.ResponseEvent,
    "incomplete": models.ResponseEvent,
    "failed": models.ResponseEvent,
    "output_item.added": models.ItemEvent,
    "output_item.done": models.ItemEvent,
    "content_part.added": models.PartEvent,
    "content_part.done": models.PartEvent,
    "output_text.delta": models.TextDeltaEvent,
    "output_text.done": models.TextDoneEvent,
    "reasoning_text.delta": models.ReasoningDeltaEvent,
    "reasoning_text.done": models.ReasoningDoneEvent,
    "function_call_arguments.delta": models.ArgumentsDeltaEvent,
    "function_call_arguments.done": models.ArgumentsDoneEvent,
}


def new_response() -> models.ResponsesResponse:
    """A response without output."""
    rest: dict[str, Any] = dict.fromkeys(
        ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key",
         "safety_identifier", "user")
    )  # fmt: skip
    return models.ResponsesResponse(
        id='resp_"1"', created_at=0, status="in_progress", metadata={"é": "\n"}, model="tiny",
        output=[], parallel_tool_calls=True, reasoning={}, store=True, temperature=1, text={},
        tool_choice="auto", tools=[], top_logprobs=0, top_p=1, **rest,
    )  # fmt: skip


def read_event(event: str, *, large: bool = False) -> dict[str, Any]:
    """The data of an event, which is checked. Large ones may have other forms of a float."""
    assert event.endswith("\n\n")
    name, data = event[:-2].split("\n")
    assert name.startswith("event: response.")
    assert data.startswith("data: {")
    kind, text = name.removeprefix("event: response."), data[6:]
    model = MODELS[kind].model_validate_json(text, extra="forbid")
    found = json.loads(text)
    assert found["type"] == f"response.{kind}"
    if large:
        assert model.model_dump() == found
    else:
        assert model.model_dump_json() == text
    return found


class ResponseStream:
    """A response that streams.

    Args:
        large: it is encoded as large ones are.

    Attributes:
        response: of the stream.
        encoder: of its events.
        events: data of its events so far.
        store: where it is stored.
        pending: deltas of the outputs to come.
    """

    def __init__(self, *, large: bool = False) -> None:
        self.response = new_response()
        self.store = ResponseStore(3, 10**7)
        self.pending: list[tuple[ChatDelta, ...]] = []
        self._large = large
        record = ResponseRecord(
            ResponsesRequest(input="a"), self.response, [], large, "ann", self.store
        )
        parts = mock.NonCallableMock(ChatParts)
        parts.deltas = self._deltas
        parts.usage = lambda: COUNT.usage(reasoning=2)
        started = self.response.model_dump_json()
        self.encoder = ResponseEncoder(self.response, started, parts, record)
        self.events = [
            self._read(event + "\n\n") for event in self.encoder.begin().split("\n\n")[:-1]
        ]

    def _deltas(self, output: RequestOutput) -> Iterator[ChatDelta]:
        return iter(self.pending.pop(0))

    def _read(self, event: str) -> dict[str, Any]:
        return read_event(event, large=self._large)

    def feed(self, *deltas: ChatDelta, last: bool = False) -> None:
        """Encode an output with these deltas."""
        self.pending.append(deltas)
        new = CompletionOutput(0, "", [])
        output = RequestOutput("a", None, [1], outputs=[new], finished=last)
        self.events += map(self._read, self.encoder.encode(0, output, last=last))

    def finish(self, reason: ChatFinishReason) -> None:
        """Encode the last output."""
        self.feed(ChatDelta(0, finish_reason=reason), last=True)
        self.encoder.store()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.events += map(self._read, self.encoder.fail(error))
        self.encoder.store()

    @property
    def kinds(self) -> list[str]:
        """The kind of each event, without the prefix that all of them have."""
        return [event["type"].removeprefix("response.") for event in self.events]
