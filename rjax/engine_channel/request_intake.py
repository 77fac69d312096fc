"""RequestIntake: makes the token masks of a request beside the engine's loop, then adds it."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rjax.engine.protocol import Engine
from rjax.engine_channel.engine_loop import EngineLoop, Settle
from rjax.errors import EngineDeadError, InvalidRequestError, RjaxError, without_frames
from rjax.sampling import SamplingParams

_MASK_THREADS = 4


class RequestIntake:
    """Adds requests to the engine of a loop, and aborts them. Any thread may call its methods.

    A grammar is compiled on another thread, so that it delays no step.

    Args:
        loop: the engine's loop.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._compiling: dict[str, object] = {}  # a marker of each request whose masks are made
        self._threads = ThreadPoolExecutor(_MASK_THREADS, "rjax-masks")

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        options: dict[str, Any],
        settle: Settle,
    ) -> None:
        """Add a request; see `rjax.engine_channel.channel.EngineChannel.add`.

        Args:
            request_id: unique among unfinished requests.
            tokens: the prompt.
            params: the request's sampling parameters.
            options: the request's options.
            settle: called on the engine's thread when it has accepted or refused the request; on
                another thread if its masks cannot be made.
        """
        options = dict(options)
        wanted = options.pop("mask_request", None)
        constrained = wanted is not None or params.structured_outputs is not None
        if not constrained or options.get("masks"):
            self._loop.post(
                lambda engine: engine.add_request(request_id, tokens, params, **options), settle
            )
            return
        marker = object()
        with self._lock:
            self._compiling[request_id] = marker

        def finish() -> bool:
            """Whether the request was not aborted meanwhile."""
            with self._lock:
                live = self._compiling.get(request_id) is marker
                if live:
                    del self._compiling[request_id]
                return live

        def add(engine: Engine) -> None:
            if not finish():
                raise InvalidRequestError(f"request {request_id!r} was aborted")
            engine.add_request(request_id, tokens, params, **options)

        def make_masks() -> None:
            try:
                options["masks"] = self._loop.engine.structured_masks(params, wanted)
            except Exception as error:
                finish()
                settle(None, without_frames(error) if isinstance(error, RjaxError) else error)
            else:
                self._loop.post(add, settle)

        try:
            self._threads.submit(make_masks)
        except RuntimeError:  # closed
            settle(None, EngineDeadError("the engine has ended"))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown ids are ignored."""
        names = list(request_ids)
        with self._lock:
            for name in names:
                self._compiling.pop(name, None)

        def abort(engine: Engine) -> None:
            for name in names:
                engine.abort_request(name)

        self._loop.post(abort)

    def close(self) -> None:
        """Let the threads end after what they compile now."""
        self._threads.shutdown(wait=False)
