"""The outputs of a request between the engine and its reader, in bounded memory."""

import asyncio
import time
from collections import deque

from rjax.errors import OverloadedError
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind

_KEPT_APART = 32  # unread outputs of one request before further ones are merged
_TURN_SECONDS = 0.01  # of one reader's work before the event loop turns to others


class OutputQueue:
    """Outputs in their order, of one request or of several that are read together.

    A reader that is behind finds the further DELTA outputs of a request merged into one, and of
    CUMULATIVE ones the last alone. One that stays behind is cut off: memory for the tokens that
    nobody reads has a bound.

    All methods belong to one event loop.

    Args:
        kind: of the outputs; FINAL_ONLY ones have no bound, since the engine holds them anyway.
        most_unread: tokens that may wait, each alternative of their logprobs counted as one more.
    """

    def __init__(self, kind: RequestOutputKind, most_unread: int) -> None:
        self._kind = kind
        self._most_unread = most_unread
        self._items: deque[RequestOutput | Exception] = deque()
        self._last: dict[str, RequestOutput] = {}
        self._apart: dict[str, int] = {}
        self._unread = 0
        self._cut = False
        self._not_empty = asyncio.Event()
        self._turn = 0.0

    def put(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            OverloadedError: too much is unread. All of that is dropped, and the error is what the
                reader gets next.
        """
        if self._cut:
            return
        name = output.request_id
        apart = self._apart.get(name, 0)
        latest = self._kind is RequestOutputKind.CUMULATIVE and apart > 0
        self._unread += _size(output) - (_size(self._last[name]) if latest else 0)
        bounded = self._kind is not RequestOutputKind.FINAL_ONLY
        if bounded and self._items and self._unread > self._most_unread:
            self._cut = True
            self._items.clear()
            self._last.clear()
            self.fail(self._too_slow())
            raise self._too_slow()
        if latest:
            self._replace(name, output)
            return
        if self._kind is RequestOutputKind.DELTA and apart >= _KEPT_APART:
            merge_delta(self._last[name], output)
            return
        self._apart[name] = apart + 1
        self._last[name] = output
        self._items.append(output)
        self._not_empty.set()

    def _replace(self, name: str, output: RequestOutput) -> None:
        """Let an output stand in the place of the one before it, all of which it holds."""
        place = next(i for i, item in enumerate(self._items) if item is self._last[name])
        self._items[place] = self._last[name] = output

    def _too_slow(self) -> OverloadedError:
        return OverloadedError(
            f"more than {self._most_unread} tokens of this request wait for their reader; "
            "read faster",
            "unread_tokens",
        )

    def fail(self, error: Exception) -> None:
        """Add an error, which `get` raises."""
        self._items.append(error)
        self._not_empty.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output and take it.

        Raises:
            Exception: what `fail` was given.
        """
        if self._items and time.monotonic() - self._turn > _TURN_SECONDS:
            await asyncio.sleep(0)  # others have their turn, however much is there to read
            self._turn = time.monotonic()
        while not self._items:
            self._not_empty.clear()
            await self._not_empty.wait()
            self._turn = time.monotonic()
        item = self._items.popleft()
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # the error's traceback refers to this frame
        self._unread -= _size(item)
        self._apart[item.request_id] -= 1
        if not self._apart[item.request_id]:
            del self._apart[item.request_id], self._last[item.request_id]
        return item


def _size(output: RequestOutput) -> int:
    """Tokens, and alternatives to them, that an output brings."""
    size = 0
    for completion in output.outputs:
        size += len(completion.token_ids)
        if completion.logprobs is not None:
            size += sum(map(len, completion.logprobs))
    return size


def merge_delta(earlier: RequestOutput, later: RequestOutput) -> None:
    """Add what a DELTA output brings to the one before it of the same request."""
    for known, new in zip(earlier.outputs, later.outputs, strict=True):
        _extend(known, new)
    earlier.finished = later.finished
    earlier.metrics = later.metrics
    earlier.prompt_logprobs = later.prompt_logprobs
    earlier.num_cached_tokens = later.num_cached_tokens
    earlier.error = later.error


def _extend(known: CompletionOutput, new: CompletionOutput) -> None:
    known.text += new.text
    known.token_ids += new.token_ids
    known.cumulative_logprob = new.cumulative_logprob
    if known.logprobs is not None and new.logprobs is not None:
        known.logprobs += new.logprobs
    known.finish_reason = new.finish_reason
    known.stop_reason = new.stop_reason
