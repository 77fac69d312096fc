"""A bounded queue between the engine and the reader of a request's outputs.

vLLM's counterpart is ``RequestOutputCollector``.
"""

import asyncio
import time
from typing import Protocol, runtime_checkable

from rjax.errors import OverloadedError
from rjax.outputs import CompletionOutput, RequestOutput, num_entries
from rjax.sampling import RequestOutputKind

_TIME_SLICE = 0.002  # seconds that one reader may run before it yields to the event loop


@runtime_checkable
class OutputSink(Protocol):
    """Takes the outputs of one or several requests, on the event loop of their engine."""

    def put(self, output: RequestOutput) -> None:
        """Take an output.

        Raises:
            OverloadedError: too many tokens are unread; no more outputs are wanted.
        """
        ...

    def fail(self, error: Exception) -> None:
        """No more outputs will come, because of this error."""
        ...


class OutputQueue:
    """Outputs of one request, or of several that are read together; at most one unread output of
    each request.

    If the reader falls behind, later DELTA outputs of a request are merged into its unread one, and
    a CUMULATIVE output replaces the one before it. If the unread tokens exceed ``most_unread``, the
    queue is closed with an error, which bounds its memory.

    Call all methods from one event loop.

    Args:
        kind: kind of the outputs. FINAL_ONLY outputs are not bounded, because the engine holds
            them anyway.
        most_unread: maximum of unread tokens; every alternative in their logprobs counts as a
            token.
    """

    def __init__(self, kind: RequestOutputKind, most_unread: int) -> None:
        self._kind = kind
        self._most_unread = most_unread
        self._outputs: dict[str, RequestOutput] = {}  # by request, the longest unread first
        self._error: Exception | None = None
        self._ended = False
        self._unread = 0
        self._not_empty = asyncio.Event()
        self._slice_start = 0.0

    def put(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            OverloadedError: too many tokens are unread. The unread outputs are dropped, and the
                reader gets this error next.
        """
        if self._ended:
            return
        earlier = self._outputs.get(output.request_id)
        if self._kind is RequestOutputKind.CUMULATIVE:
            replaced, earlier = earlier, None
            self._unread -= 0 if replaced is None else _size(replaced)
        self._unread += _size(output)
        bounded = self._kind is not RequestOutputKind.FINAL_ONLY
        if bounded and self._outputs and self._unread > self._most_unread:
            self._outputs.clear()
            self.fail(self._too_slow())
            raise self._too_slow()
        if earlier is not None:
            merge_delta(earlier, output)
            return
        self._outputs[output.request_id] = output
        self._not_empty.set()

    def _too_slow(self) -> OverloadedError:
        return OverloadedError(
            f"more than {self._most_unread} tokens of this request wait for their reader; "
            "read faster",
            "unread_tokens",
        )

    def fail(self, error: Exception) -> None:
        """End the queue: after the unread outputs, `get` raises this error once."""
        if not self._ended:
            self._error, self._ended = error, True
            self._not_empty.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output and take it.

        Raises:
            Exception: what `fail` was given.
        """
        if self._outputs and time.monotonic() - self._slice_start > _TIME_SLICE:
            await asyncio.sleep(0)  # yield, so that one reader of many requests blocks no other
            self._slice_start = time.monotonic()
        while (output := self.take()) is None:
            self._not_empty.clear()
            await self._not_empty.wait()
            self._slice_start = time.monotonic()
        return output

    def take(self) -> RequestOutput | None:
        """Take the next output; None if there is none now.

        Raises:
            Exception: what `fail` was given, after the last output.
        """
        if not self._outputs:
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # break the cycle of error, traceback, frame and queue
            return None
        output = self._outputs.pop(next(iter(self._outputs)))
        self._unread -= _size(output)
        return output


def _size(output: RequestOutput) -> int:
    """Tokens of an output plus the alternatives in their logprobs."""
    size = 0
    for completion in output.outputs:
        size += len(completion.token_ids)
        if completion.logprobs is not None:
            size += num_entries(completion.logprobs)
    return size


def join_output(
    waiting: dict[str, RequestOutput], output: RequestOutput, kind: RequestOutputKind
) -> None:
    """Add an output to those that wait, by request: a DELTA is appended to the earlier one of its
    request, any other takes its place."""
    earlier = waiting.get(output.request_id)
    if earlier is not None and kind is RequestOutputKind.DELTA:
        merge_delta(earlier, output)
    else:
        waiting[output.request_id] = output


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
        known.logprobs += new.logprobs  # pyright: ignore[reportOperatorIssue]
    if known.weights_versions is not None and new.weights_versions is not None:
        known.weights_versions += new.weights_versions
    known.finish_reason = new.finish_reason
    known.stop_reason = new.stop_reason
    known.error = new.error
