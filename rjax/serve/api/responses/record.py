"""The JSON and the stored form of a response that has ended."""

import dataclasses

from pydantic import TypeAdapter

from rjax.serve.api.responses.events import models_json
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import FunctionCall, Message, ToolCall
from rjax.serve.protocol.responses_api_models import (
    ResponseFunctionToolCall,
    ResponseReasoningItem,
    ResponsesResponse,
)
from rjax.serve.protocol.responses_api_requests import Item, ResponsesRequest
from rjax.serve.stores.event_log import EventLog
from rjax.serve.stores.input_items import InputItem, stored_items
from rjax.serve.stores.response_store import ResponseStore, StoredResponse

MESSAGES = TypeAdapter(list[Message])
"""Parses and dumps the messages of a stored conversation."""

_MANY_ITEMS = 128  # of an input; more are written on a thread


class ResponseRecord:
    """Stores a response if its request wants that and if it fits.

    Args:
        body: the request's body.
        response: the request's response.
        messages: messages of the conversation before the response.
        large_echo: whether the fields repeated from the request are large.
        tenant: name of the client's tenant.
        store: the server's store of responses.

    Attributes:
        is_large: whether to call `end` on a thread, whatever the output.
        log: log of the events of a stream in the background; None for other responses.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        response: ResponsesResponse,
        messages: list[Message],
        large_echo: bool,
        tenant: str,
        store: ResponseStore,
    ) -> None:
        self._input: str | list[Item] = body.input
        self._response = response
        self._messages = messages
        self._tenant = tenant
        self._store = store
        self._kept: StoredResponse | None = None
        many = isinstance(body.input, list) and len(body.input) > _MANY_ITEMS
        self.is_large = large_echo or many
        self.log = EventLog(self._count) if body.background and body.stream else None

    def begin(self, started: str) -> StoredResponse:
        """A response in the background as it is stored at first. Call it from any thread.

        Args:
            started: JSON of the response without output.

        Raises:
            ApiError: 400, it cannot be stored.
        """
        name, items = self._response.id, self._items()
        kept = StoredResponse(name, started.encode(), b"", items, background=True, events=self.log)
        if not self._store.has_room(kept.size):
            raise ApiError(
                400,
                f"a response in the background is stored, and this one has {kept.size} bytes "
                "before any output, more than a key may have; shorten its input or metadata",
                param="background",
            )
        return kept

    def end(self, *, large: bool) -> str:
        """The JSON of the ended response; `store` then stores it. Call it from any thread.

        Args:
            large: the output is large, so that other threads must run in between.
        """
        large = large or self.is_large
        response, store = self._response, self._store
        if not response.background:
            response.store = response.store and response.status != "failed"
        data = self._json(large=large)
        if not response.store:
            return data
        conversation = b""
        if response.status in ("completed", "incomplete"):
            messages = [*self._messages, _message(response)]
            conversation = MESSAGES.dump_json(messages, exclude_none=True)
        kept = StoredResponse(
            response.id,
            data.encode(),
            conversation,
            self._items(),
            background=response.background,
            events=self.log,
        )
        if not store.has_room(kept.size):
            if not response.background:
                response.store = False
                return self._json(large=large)
            kept = dataclasses.replace(kept, response=self._too_large(), conversation=b"")
        self._kept = kept
        return data

    def store(self) -> None:
        """Store what `end` prepared. Call it on the event loop."""
        if self._kept is None:
            return
        if self._kept.background:
            self._store.replace(self._tenant, self._kept)
        else:
            self._store.add(self._tenant, self._kept)

    def _count(self, size: int) -> None:
        self._store.count_events(self._tenant, self._response.id, size)

    def _json(self, *, large: bool) -> str:
        return models_json(self._response, large=large)

    def _items(self) -> tuple[InputItem, ...]:
        return stored_items(self._input, self._response.id)

    def _too_large(self) -> bytes:
        """The JSON of a response whose output cannot be stored."""
        error = ApiError(500, "the response is larger than the server stores; stream it instead")
        failed = self._response.model_copy(update={"output": []})
        ResponseWriter(failed).fail(error)
        return models_json(failed, large=self.is_large).encode()


def _message(response: ResponsesResponse) -> Message:
    """The output of a response as an assistant message."""
    reasoning: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for item in response.output:
        if isinstance(item, ResponseFunctionToolCall):
            function = FunctionCall(name=item.name, arguments=item.arguments)
            calls.append(ToolCall(id=item.call_id, function=function))
        else:
            into = reasoning if isinstance(item, ResponseReasoningItem) else texts
            into += [part.text for part in item.content]
    return Message(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="".join(reasoning) or None,
        tool_calls=calls or None,
    )
