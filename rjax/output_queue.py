"""A bounded queue between the engine and the reader of a request's outputs.

vLLM's counterpart is ``RequestOutputCollector``.
"""

import asyncio
import time
from collections import deque

from rjax.errors import OverloadedError
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind

_MAX_UNMERGED = 32  # unread outputs of one request; later ones are merged into the last
_TIME_SLICE = 0.01  # seconds that one reader may run before it yields to the event loop


class OutputQueue:
    """Outputs of one request, or of several that are read together, in order.

    If the reader falls behind, later DELTA outputs of a request are merged into one, and a
    CUMULATIVE output replaces the one before it. If the unread tokens exceed ``most_unread``, the
    queue is closed with an error, which bounds its memory.

    Call all methods from one event loop.

    Args:
        kind: of the outputs. FINAL_ONLY outputs are not bounded, because the engine holds them
            anyway.
        most_unread: maximum of unread tokens; every alternative in their logprobs counts as a
            token.
    """

    def __init__(self, kind: RequestOutputKind, most_unread: int) -> None:
        self._kind = kind
        self._most_unread = most_unread
        self._items: deque[RequestOutput | Exception] = deque()
        self._last: dict[str, RequestOutput] = {}
        self._num_unread: dict[str, int] = {}
        self._unread = 0
        self._cut = False
        self._not_empty = asyncio.Event()
        self._slice_start = 0.0

    def put(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            OverloadedError: too many tokens are unread. The unread outputs are dropped, and the
                reader gets this error next.
        """
        if self._cut:
            return
        name = output.request_id
        num_unread = self._num_unread.get(name, 0)
        latest = self._kind is RequestOutputKind.CUMULATIVE and num_unread > 0
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
        if self._kind is RequestOutputKind.DELTA and num_unread >= _MAX_UNMERGED:
            merge_delta(self._last[name], output)
            return
        self._num_unread[name] = num_unread + 1
        self._last[name] = output
        self._items.append(output)
        self._not_empty.set()

    def _replace(self, name: str, output: RequestOutput) -> None:
        """Replace the request's last unread output by a newer CUMULATIVE one."""
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
        if self._items and time.monotonic() - self._slice_start > _TIME_SLICE:
            await asyncio.sleep(0)  # yield, so that a full queue does not block other tasks
            self._slice_start = time.monotonic()
        while not self._items:
            self._not_empty.clear()
            await self._not_empty.wait()
            self._slice_start = time.monotonic()
        item = self._items.popleft()
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # break the cycle of the error, its traceback and this frame
        self._unread -= _size(item)
        self._num_unread[item.request_id] -= 1
        if not self._num_unread[item.request_id]:
            del self._num_unread[item.request_id], self._last[item.request_id]
        return item


def _size(output: RequestOutput) -> int:
    """Tokens of an output plus the alternatives in their logprobs."""
    size = 0
    for completion in output.outputs:
        size += len(completion.token_ids)
        if completion.logprobs is not None:
            size += sum(map(len, completion.logprobs))
    return size


def merge_delta(earlier: RequestOutput, later: RequestOutput) -> None:
    """Append a DELTA output to the earlier one of the same request."""
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
