"""The outputs of `LLM.stream`, one by one as they are generated."""

import contextlib
from collections.abc import Iterator

from rjax.closing import SynchronizedClosable
from rjax.errors import EngineClosedError
from rjax.outputs import RequestOutput
from rjax.request_runner import RequestRunner, StreamBuffer


class OutputStream(Iterator[RequestOutput]):
    """An iterator over the increments of one or several requests.

    Each `RequestOutput` holds what is new of one prompt, named by ``prompt_index``: text, tokens
    and logprobs of each of its samples. The last one of a prompt has ``finished`` set. Increments
    that belong together add up to what `LLM.generate` returns.

    The engine steps while its user waits in ``next``. Between two outputs the LLM is free: other
    threads, and the body of the loop, may call it, and their calls and this stream share steps.
    Any thread may read on, one at a time.

    What still runs is aborted by `close`, at the end of a ``with`` block, or when the last
    reference goes, as at a ``break`` out of a for loop over ``llm.stream(...)``. After the LLM was
    closed, ``next`` raises EngineClosedError.
    """

    def __init__(
        self, llm: SynchronizedClosable, runner: RequestRunner, inbox: StreamBuffer
    ) -> None:
        self._llm = llm
        self._runner = runner
        self._inbox = inbox
        self._ended = False

    def __next__(self) -> RequestOutput:
        """Wait for the next increment.

        Raises:
            StopIteration: all requests have finished, or the stream was closed.
            EngineClosedError: the LLM was closed meanwhile.
        """
        if self._ended:
            raise StopIteration
        with self._llm.locked():
            try:
                while (output := self._inbox.take()) is None and self._inbox.live:
                    self._runner.step()
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
        """Abort what still runs, and drop what is not read; waits for the calls of other threads.
        Closing twice does nothing."""
        with contextlib.suppress(EngineClosedError):  # which aborted it
            if not self._ended:
                with self._llm.locked():
                    self._close()
        self._ended = True

    def _close(self) -> None:
        self._ended = True
        self._runner.close_stream(self._inbox)

    def __del__(self) -> None:
        # A collection may come in the middle of a step of this very thread.
        if not self._ended and not self._llm.if_idle(self._close):
            self._runner.abandon(self._inbox)
