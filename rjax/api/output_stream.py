"""The iterator that `LLM.stream` returns."""

import contextlib
from collections.abc import Iterator

from rjax.api.request_runner import RequestRunner, StreamBuffer
from rjax.closing import SynchronizedClosable
from rjax.errors import EngineClosedError, EnginePausedError
from rjax.outputs import RequestOutput


class OutputStream(Iterator[RequestOutput]):
    """An iterator over the output deltas of one or several requests.

    Each `RequestOutput` holds the new text, tokens and logprobs of every sample of one prompt;
    ``prompt_index`` says which prompt. The last output of a prompt has ``finished`` set. The deltas
    of a prompt, joined, equal the output of `LLM.generate`.

    The engine steps only inside ``next``. Between two outputs, other threads and the loop body may
    call the LLM; their requests and this stream share steps. Several threads may read the stream,
    one at a time.

    `close`, the end of a ``with`` block and the loss of the last reference (for example a ``break``
    out of ``for output in llm.stream(...)``) abort unfinished requests. After the LLM is closed,
    ``next`` raises EngineClosedError.
    """

    def __init__(
        self, llm: SynchronizedClosable, runner: RequestRunner, buffer: StreamBuffer
    ) -> None:
        self._llm = llm
        self._runner = runner
        self._buffer = buffer
        self._ended = False

    def __next__(self) -> RequestOutput:
        """Wait for the next output.

        Raises:
            StopIteration: all requests have finished, or the stream was closed.
            EngineClosedError: the LLM was closed.
            EnginePausedError: the LLM is paused, and has no further output; the stream stays open.
        """
        if self._ended:
            raise StopIteration
        with self._llm.locked():
            try:
                while (output := self._buffer.take()) is None and self._buffer.live:
                    self._runner.step()
            except EnginePausedError:
                raise
            except BaseException:
                self._close()
                raise
        if output is None:
            self._ended = True
            raise StopIteration
        return output

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort unfinished requests and drop unread outputs, after the calls of other threads have
        returned. Closing twice does nothing."""
        with contextlib.suppress(EngineClosedError):  # closing the LLM aborted the requests
            if not self._ended:
                with self._llm.locked():
                    self._close()
        self._ended = True

    def _close(self) -> None:
        self._ended = True
        self._runner.close_stream(self._buffer)

    def __del__(self) -> None:
        # The garbage collector may run this in the middle of a step of the same thread.
        if not self._ended and not self._llm.if_idle(self._close):
            self._runner.abandon(self._buffer)
