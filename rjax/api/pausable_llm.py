"""The methods of `rjax.LLM` that pause it and put it to sleep."""

from collections.abc import Collection

from rjax.api.request_runner import RequestRunner
from rjax.closing import SynchronizedClosable, synchronized
from rjax.engine.protocol import Engine, RunningMode


class PausableLLM(SynchronizedClosable):
    """An LLM whose engine is paused, put to sleep and woken up.

    Attributes:
        engine: the engine.
    """

    engine: Engine
    _runner: RequestRunner

    @synchronized
    def pause(self, mode: RunningMode = "abort") -> None:
        """Schedule no new requests until `resume`.

        It returns when no step has anything left to do. Calls of other threads come first: while
        one of them generates, this waits for it. While the LLM is paused, requests of `stream`
        queue, and calls that would wait for an answer raise EnginePausedError. Timeouts go on.

        Args:
            mode: what becomes of the requests of streams. "abort" ends all, with ``finish_reason``
                "abort"; "wait" computes those that have started to their end; "keep" freezes them
                with their KV, and they go on after `resume`.

        Raises:
            InvalidRequestError: ``mode`` is none of these.
        """
        self.engine.pause(mode)
        self._drain()

    @synchronized
    def resume(self) -> None:
        """End a pause.

        Raises:
            EngineSleepingError: the engine sleeps; `wake_up` resumes it.
        """
        self.engine.resume()

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        self._check_open()
        return self.engine.is_paused()

    @synchronized
    def sleep(self, level: int = 1, mode: RunningMode = "abort") -> None:
        """Give back the device memory of the KV pool and of the weights; compiled programs stay.

        All KV is forgotten. Named prefixes and the system prompt are computed again by the first
        request that starts with them. Until `wake_up`, requests raise EngineSleepingError.

        Args:
            level: 1 copies the weights to page-locked host memory. 2 drops them, and `wake_up`
                loads those of the checkpoint.
            mode: what becomes of the requests of streams; see `pause`. After "keep" they are
                computed again up to where they were, and go on.

        Raises:
            InvalidRequestError: another level or mode.
            OutOfMemoryError: the host has no memory for the weights; nothing is given back.
        """
        self.engine.check_sleep_level(level)
        self.engine.pause(mode, for_sleep=True)
        self._drain()
        self.engine.sleep(level)

    @synchronized
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again, and resume once all is there, unless the LLM was paused before.

        Args:
            tags: "weights" and "kv_cache", in a list; None for both.

        Raises:
            InvalidRequestError: another tag.
            OutOfMemoryError: the devices have no memory for it; call it again.
        """
        self.engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether some memory is given back."""
        self._check_open()
        return self.engine.is_sleeping()

    def _drain(self) -> None:
        while self.engine.is_draining():
            self._runner.step()
