"""EngineChannel: a front end's interface to an engine, in this process or in another."""

import abc
import pathlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from rjax.batch.compile_progress import CompileProgress
from rjax.engine.protocol import NamedPrefix, PrefixEngine
from rjax.engine_channel.facts import EngineFacts
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer

UTILITIES = (
    "abort_request",
    "add_prefix",
    "add_weights",
    "cancel_weight_update",
    "check_sleep_level",
    "drop_prefix",
    "is_draining",
    "is_paused",
    "is_sleeping",
    "kernels",
    "limit_grammar_cache",
    "load_prefix",
    "pause",
    "prefixes",
    "reset_prefix_cache",
    "resume",
    "save_prefix",
    "set_shared_prefix",
    "sleep",
    "start_weight_update",
    "startup_seconds",
    "stats",
    "try_finish_weight_update",
    "wake_up",
)
"""Methods of the engine that a front end may call by name. In place of the arrays of
``add_weights``, another process gets the path of a `rjax.engine_channel.weight_file.WeightFile`."""


class StepSink(Protocol):
    """Takes the outputs of one step; called on the event loop."""

    def __call__(self, outputs: list[RequestOutput], /) -> None: ...


class EngineChannel(abc.ABC):
    """Carries requests to an engine and its outputs back to an event loop.

    Call the methods from the event loop that awaited `start`, except where they say otherwise.
    """

    @property
    @abc.abstractmethod
    def facts(self) -> EngineFacts:
        """Sizes and settings of the engine. Any thread may read them."""

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, or an equal one; None where it serves token ids only."""

    @property
    @abc.abstractmethod
    def heartbeat(self) -> float:
        """Time of ``time.monotonic`` at which the engine was last between two steps."""

    @property
    @abc.abstractmethod
    def dead(self) -> bool:
        """Whether the engine has ended, for whatever reason."""

    @property
    @abc.abstractmethod
    def failed(self) -> bool:
        """Whether the engine ended by itself, on an error."""

    @property
    @abc.abstractmethod
    def last_stats(self) -> Any:
        """Statistics from before the current step; None before the first."""

    @property
    @abc.abstractmethod
    def is_built(self) -> bool:
        """Whether the engine is built, so that its `compile_progress` is known. Any thread may
        call this."""

    @abc.abstractmethod
    def compile_progress(self) -> CompileProgress:
        """See `rjax.engine.protocol.Engine.compile_progress`."""

    @abc.abstractmethod
    async def start(self, on_outputs: StepSink, on_failure: Callable[[], None]) -> None:
        """Start to run requests.

        Args:
            on_outputs: called on the event loop once for each step with outputs.
            on_failure: called on the event loop when the engine has failed.
        """

    @abc.abstractmethod
    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: dict[str, Any],
    ) -> Awaitable[None]:
        """Add a request; resolved when the engine has accepted it.

        Args:
            request_id: unique among unfinished requests.
            prompt_token_ids: the prompt.
            params: the request's sampling parameters.
            options: further arguments of the engine's ``add_request``, and ``mask_request``, an
                `rjax.structured.mask_request.MaskRequest`.

        Raises:
            InvalidRequestError: the engine refuses the request.
            EngineDeadError: the engine has stopped.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that have no reader. Unknown ids are ignored."""

    @abc.abstractmethod
    def call_utility(self, name: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call one of `UTILITIES` between two steps; its exception is raised here.

        Raises:
            EngineDeadError: the engine has stopped.
        """

    @abc.abstractmethod
    def call_utility_sync(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """`call_utility` for threads other than that of the event loop, also before `start`."""

    @abc.abstractmethod
    def end(self) -> None:
        """Tell the engine to end after its current step. Any thread may call this."""

    @abc.abstractmethod
    def join(self, seconds: float) -> bool:
        """Wait for the engine to end, on any thread. Return whether it has ended."""


class RemotePrefixEngine(PrefixEngine):
    """The methods about prefixes of the engine behind a channel; see `PrefixEngine`.

    They block. Call them on any thread but that of the event loop.

    Args:
        channel: channel to the engine.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._channel.tokenizer

    def set_shared_prefix(self, token_ids: Sequence[int]) -> None:
        self._channel.call_utility_sync("set_shared_prefix", token_ids)

    def add_prefix(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        text: str | None = None,
    ) -> None:
        self._channel.call_utility_sync(
            "add_prefix", name, token_ids, cache_salt=cache_salt, text=text
        )

    def drop_prefix(self, name: str) -> None:
        self._channel.call_utility_sync("drop_prefix", name)

    def prefixes(self) -> list[NamedPrefix]:
        return self._channel.call_utility_sync("prefixes")

    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        self._channel.call_utility_sync("save_prefix", name, path)

    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> NamedPrefix:
        return self._channel.call_utility_sync("load_prefix", path, name, cache_salt=cache_salt)


def check_utility(name: str) -> None:
    """Check that a front end may call this method of the engine."""
    if name not in UTILITIES:
        raise ValueError(f"{name!r} is no utility of an engine; there are {', '.join(UTILITIES)}")
