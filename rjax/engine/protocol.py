"""What `rjax.LLM`, `rjax.AsyncLLM` and the server use of an engine."""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from rjax.batch.compile_progress import CompileProgress
from rjax.batch.kernel_use import KernelUse
from rjax.batch.token_mask import TokenMask
from rjax.models.adopting.mapping import WeightMapping
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.structured.mask_request import MaskRequest
from rjax.tokenization import Tokenizer

RunningMode = Literal["wait", "abort", "keep"]
"""What happens to running requests: they finish first, end now, or go on with the KV they have."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A named prefix whose KV is pinned in the pool.

    Attributes:
        name: chosen by the caller that added it.
        token_ids: the tokens of the prefix.
        cache_salt: only requests with the same salt are served from it; None for those without.
        pages: pages of the pool that hold its KV, in order; with windows, those of one page group
            after another. Empty after new weights or a sleep, until the prefix is first used.
        text: the text that the tokens were made from, or None.
        state: the state page behind its last full page; None without one.
    """

    name: str
    token_ids: tuple[int, ...]
    cache_salt: str | None
    pages: tuple[int, ...]
    text: str | None = None
    state: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KeepAs:
    """Asks the engine to pin the prompt of a request as a named prefix when the request finishes.

    Attributes:
        name: name of the prefix; a name in use gets the new tokens.
        text: the text that the tokens were made from, stored with them.
    """

    name: str
    text: str | None = None


@runtime_checkable
class PrefixEngine(Protocol):
    """The methods about prefixes of an engine; `rjax.engine.llm_engine.LLMEngine` has them.

    Every method raises EngineClosedError after the engine was closed.
    """

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None where the engine serves token ids only."""
        ...

    def set_shared_prefix(self, token_ids: Sequence[int]) -> None:
        """Compute the KV of a prefix without a name and pin it in place of the one before.

        An empty list only releases the one before. Raises the errors of ``add_prefix``.
        """
        ...

    def add_prefix(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        text: str | None = None,
    ) -> None:
        """Compute the KV of a prefix and pin it under a name, until it is dropped or replaced.

        Any number of prefixes live at once; prefixes that start with the same tokens share pages.
        A request is served from them when it starts with the same tokens, or when it names the
        prefix. Nothing is recompiled.

        The call runs engine steps until the prefix is computed. To go on serving other requests
        meanwhile, queue a request with ``keep_as`` instead.

        Args:
            name: 1 to 256 characters; a name in use gets the new tokens.
            token_ids: the tokens of the prefix.
            cache_salt: only requests with the same salt are served from it.
            text: the text that the tokens were made from; stored and saved with them.

        Raises:
            InvalidRequestError: a bad name or salt, too many tokens, or ids out of range.
            InvalidConfigError: the engine was made without a prefix cache.
            OutOfMemoryError: the rest of the pool would not hold a sequence of full length.
            EngineSleepingError, EnginePausedError: it sleeps or is paused, or an update of the
                weights waits for running requests.
        """
        ...

    def drop_prefix(self, name: str) -> None:
        """Unpin a named prefix; its pages may be evicted from now on.

        Raises:
            InvalidRequestError: there is no prefix of this name.
        """
        ...

    def prefixes(self) -> list[NamedPrefix]:
        """The named prefixes, in the order in which they were added."""
        ...

    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        """Write the tokens and the KV of a named prefix to a safetensors file.

        Raises:
            InvalidRequestError: there is no prefix of this name, or the file cannot be written.
            EngineSleepingError, EnginePausedError: as `add_prefix`, for a prefix without KV.
        """
        ...

    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> NamedPrefix:
        """Pin a prefix that ``save_prefix`` wrote; nothing is computed.

        Args:
            path: path of the file.
            name: name of the prefix, see ``add_prefix``; None takes the name in the file.
            cache_salt: see ``add_prefix``.

        Raises:
            InvalidConfigError: the file is no prefix, or belongs to another model, dtype or page
                size; or it has too many tokens, or ids out of range.
            InvalidRequestError: a bad name or salt.
            OutOfMemoryError: see ``add_prefix``.
        """
        ...


@runtime_checkable
class WeightEngine(Protocol):
    """The methods of an engine that give it new weights, by a transaction.

    Nothing changes before the update is finished. Every error cancels it, and the old weights stay
    in use; start another update then.
    """

    @property
    def weights_version(self) -> int:
        """Number of updates of the weights; it is part of the hashes of pages."""
        ...

    def start_weight_update(
        self, *, partial: bool = False, mapping: str | WeightMapping | None = None
    ) -> None:
        """Begin an update.

        Args:
            partial: whether tensors may be missing, whose parameters stay as they are.
            mapping: the names and axes of the arrays: None for a Hugging Face checkpoint's, the
                name of a built-in mapping, or one of `rjax.models.adopting.mapping`.

        Raises:
            InvalidWeightsError: an update is under way, or the mapping cannot be used.
        """
        ...

    def add_weights(self, items: Any) -> None:
        """Add a tree of arrays, or (name, array) items; any number of times.

        Arrays are NumPy's, JAX's or of any library with DLPack, on the host or on any device. They
        are referred to and not copied: leave them unchanged until the update is finished.

        Raises:
            InvalidWeightsError: no update is under way, or an array cannot be used.
        """
        ...

    def try_finish_weight_update(self, mode: RunningMode = "wait") -> int | None:
        """`finish_weight_update` between two steps: None while running requests have to finish
        first; call it again after the next step. Requests that have not started wait meanwhile."""
        ...

    def finish_weight_update(self, mode: RunningMode = "wait") -> int:
        """Check what was added and replace the weights, between two steps.

        Args:
            mode: what happens to running requests: "wait" runs steps until they have finished,
                "abort" ends them with the finish reason "abort", and "keep" lets them go on with
                the KV that they have; ``weights_versions`` of their outputs tells which weights
                computed each token. Requests that have not started use the new weights.

        Returns:
            The new version of the weights.

        Raises:
            InvalidWeightsError: no update is under way, or a tensor is unknown, missing, not
                finite, or of the wrong shape or type.
            EngineDeadError: the devices failed half-way; the engine is of no use any more.
        """
        ...

    def cancel_weight_update(self) -> None:
        """Drop an update; nothing happens if none is under way."""
        ...


@runtime_checkable
class Engine(PrefixEngine, WeightEngine, Protocol):
    """An engine; `rjax.engine.llm_engine.LLMEngine` is one, tests have others.

    Attributes:
        summary: model, dtype, sizes and kernels, by name, for the commands to show.
    """

    summary: dict[str, str]

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        share: str | None = None,
        masks: Sequence[TokenMask] = (),
        prefix: str | None = None,
        cache_salt: str | None = None,
        timeout: float | None = None,
        keep_as: KeepAs | None = None,
        logprob_start_len: int = 0,
        prompt_temperature: float = 1.0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among live requests.
            prompt_token_ids: 1 to ``max_model_len`` - 1 tokens, or up to ``max_model_len`` with a
                ``logprob_start_len``; the one token that is then sampled has no KV.
            params: how to sample; checked against this model here.
            prompt: the prompt's text, for the output.
            priority: smaller runs first in a share; see ``SchedulerSettings.priority_patience``.
            share: rows are divided evenly among the shares with requests; None is one of them.
            masks: one token mask for each sample that is generated; by default those of
                ``params.structured_outputs``, as ``structured_masks`` returns them.
            prefix: a named prefix whose tokens are put in front of the prompt's.
            cache_salt: KV is shared only with requests of the same salt; None: the prefix's.
            timeout: seconds from now after which the request is aborted.
            keep_as: keep the prompt's KV as a prefix of this name when the request has finished.
                The last output has an OutOfMemoryError in ``error`` if it could not be kept.
            logprob_start_len: index of the first prompt token that ``params.prompt_logprobs``
                reports. Entries before it are None, and the tokens before it may be served from the
                cache.
            prompt_temperature: what divides the logits of ``params.prompt_logprobs``, 0.01 to 100.

        Raises:
            InvalidRequestError: the request cannot be served as it is; nothing is queued.
            InvalidConfigError, OutOfMemoryError: see `PrefixEngine.add_prefix`; for ``keep_as``.
        """
        ...

    def structured_masks(
        self, params: SamplingParams, wanted: MaskRequest | None = None
    ) -> Sequence[TokenMask]:
        """The masks of a constraint, by default ``params.structured_outputs``, one per sample; any
        thread may call this."""
        ...

    def limit_grammar_cache(
        self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float
    ) -> None:
        """Bound the memory of compiled constraints; see
        `rjax.structured.compiler.GrammarCompiler.limit_cache`."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step, or several decode steps in one program.

        Returns:
            Outputs of requests with new tokens; a request with FINAL_ONLY output appears once,
            when it is finished.
        """
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to compute or to return. Requests that a pause holds
        back do not count."""
        ...

    def abort_request(self, request_id: str) -> None:
        """End a request now and free its pages.

        Unknown ids are ignored, since a request may finish before its abort arrives.
        """
        ...

    def stop_samples(self, request_id: str, samples: Collection[int]) -> None:
        """End samples of a request, in whose text its reader found a stop string.

        Unknown and finished ones are ignored, since they may end before the news arrives.
        """
        ...

    def pause(self, mode: RunningMode = "abort", *, for_sleep: bool = False) -> None:
        """Schedule no new requests until ``resume``; they queue meanwhile, and their timeouts run.

        Calling it again changes the mode. ``is_draining`` says how long ``step`` has work to do.

        Args:
            mode: what becomes of unfinished requests. "abort" ends all, with ``finish_reason``
                "abort"; "wait" lets those that have started finish; "keep" freezes them where they
                are: they keep their KV and go on after ``resume``.
            for_sleep: resume when the engine wakes up, unless it was paused before.

        Raises:
            InvalidRequestError: ``mode`` is none of these.
        """
        ...

    def resume(self) -> None:
        """End a pause.

        Raises:
            EngineSleepingError: the engine sleeps; ``wake_up`` resumes it.
        """
        ...

    def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        ...

    def is_draining(self) -> bool:
        """Whether a paused engine has anything left to compute or to return."""
        ...

    def check_sleep_level(self, level: int) -> None:
        """Check the level of a sleep before the pause.

        Raises:
            InvalidRequestError: it is neither 1 nor 2.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the KV pool and of the weights; compiled programs stay.

        All KV is forgotten. Requests that have started are computed again after ``wake_up``, up to
        where they are; named prefixes keep their tokens, and are filled again by the first request
        that starts with them. While the engine sleeps, new requests are refused.

        Args:
            level: 1 copies the weights to host memory; 2 drops them, and ``wake_up`` loads those
                of the checkpoint.

        Raises:
            InvalidRequestError: another level.
            OutOfMemoryError: the host has no memory for the weights; the engine does not sleep.
        """
        ...

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again, of all or of some; resume once all is there.

        Args:
            tags: "weights" and "kv_cache", in a list; None for both. Tags that are awake are
                ignored.

        Raises:
            InvalidRequestError: another tag.
            OutOfMemoryError: the devices have no memory for it; call it again.
        """
        ...

    def is_sleeping(self) -> bool:
        """Whether ``wake_up`` has to be called, for one tag at least."""
        ...

    def reset_prefix_cache(self) -> Any:
        """Drop the KV of finished requests; that of pinned prefixes and running requests stays."""
        ...

    def kernels(self) -> list[KernelUse]:
        """The kernel of each operation at each step size, and why not a faster one."""
        ...

    def compile_progress(self) -> CompileProgress:
        """How far the compilation of the step sizes is; any thread may call this."""
        ...

    def startup_seconds(self) -> dict[str, float]:
        """Seconds of each phase of the start; any thread may call this."""
        ...

    def stats(self) -> Any:
        """A copy of the counters with the current memory figures."""
        ...
