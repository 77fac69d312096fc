"""Adds the requests of an LLM's calls to the engine and routes their outputs back."""

import contextlib
import dataclasses
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rjax.api.progress import Progress
from rjax.api.prompts import Prompt, raise_first_refusal
from rjax.engine.protocol import Engine
from rjax.engine_channel.output_queue import join_output
from rjax.errors import EnginePausedError, InvalidRequestError, without_frames
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer

_REQUESTS_PER_STEP = 32  # added between two steps while a batch is being added


@contextlib.contextmanager
def freeze_gc_heap() -> Iterator[None]:
    """Exclude all existing objects from garbage collection inside the block (``gc.freeze``).

    A full collection scans every object of the process, including those of JAX and the caller. It
    takes tenths of a second, during which no step is dispatched. At the end of the block all
    objects are unfrozen, including those that the caller froze before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclasses.dataclass(frozen=True, slots=True)
class NewRequest:
    """A prompt to complete.

    Attributes:
        prompt: the prompt with its token ids, or the error that refuses it.
        params: how to sample.
        priority: lower runs earlier.
        options: further arguments of the engine's ``add_request``.
    """

    prompt: Prompt | InvalidRequestError
    params: SamplingParams
    priority: int = 0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class StreamBuffer:
    """The unread outputs of one stream; unread outputs of a request are merged into one.

    Args:
        index: index of each request's prompt in the caller's list, by request id.
    """

    def __init__(self, index: dict[str, int]) -> None:
        self.live = set(index)
        self._index = index
        self._unread: dict[str, RequestOutput] = {}

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        name = output.request_id
        output.prompt_index = self._index[name]
        if output.finished:
            self.live.discard(name)
        join_output(self._unread, output, RequestOutputKind.DELTA)

    def take(self) -> RequestOutput | None:
        """Remove and return the oldest output; None if there is none."""
        if not self._unread:
            return None
        return self._unread.pop(next(iter(self._unread)))


class RequestRunner:
    """Adds requests to an engine and steps it. Not thread-safe: the caller holds a lock.

    Every step puts outputs of open streams into their buffers, whichever call runs the step.

    Args:
        engine: where the requests run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._buffers: dict[str, StreamBuffer] = {}
        self._abandoned: deque[StreamBuffer] = deque()

    def new_id(self) -> str:
        """A new request id."""
        return str(next(self._ids))

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of requests that are not streamed.

        Raises:
            EnginePausedError: the engine is paused, and no step would compute anything.
        """
        if not self._engine.has_unfinished_requests() and self._engine.is_paused():
            raise EnginePausedError("the engine is paused and computes nothing; call resume first")
        while self._abandoned:
            self.close_stream(self._abandoned.popleft())
        others = []
        for output in self._engine.step():
            buffer = self._buffers.get(output.request_id)
            if buffer is None:
                others.append(output)
                continue
            buffer.put(output)
            if output.finished:
                del self._buffers[output.request_id]
        return others

    @freeze_gc_heap()
    def run(
        self, requests: list[NewRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Complete requests; see `LLM.generate`."""
        ids = [self.new_id() for _ in requests]
        alike = len({request.priority for request in requests}) == 1
        done: dict[str, RequestOutput] = {}
        waiting: set[str] = set()
        progress = Progress(use_tqdm, len(requests))
        try:
            for i, (name, request) in enumerate(zip(ids, requests, strict=True)):
                refusal = self._add(i, name, request, alone=len(requests) == 1)
                if refusal is None:
                    waiting.add(name)
                else:
                    done[name] = refusal
                    progress.advance(1)
                # The device starts on the first requests while the host adds the others. With
                # different priorities, all requests must be added before the first step.
                if alike and waiting and (i + 1) % _REQUESTS_PER_STEP == 0:
                    self._step(waiting, done, progress)
            while waiting:
                self._step(waiting, done, progress)
        except BaseException:
            for name in waiting:
                self._engine.abort_request(name)
            raise
        finally:
            progress.close()
        found = [done[name] for name in ids]
        for i, output in enumerate(found):
            output.prompt_index = i
        return found

    def open_stream(self, requests: list[NewRequest]) -> StreamBuffer:
        """Add requests whose outputs are read one by one."""
        ids = [self.new_id() for _ in requests]
        buffer = StreamBuffer({name: i for i, name in enumerate(ids)})
        added: list[str] = []
        try:
            for i, (name, request) in enumerate(zip(ids, requests, strict=True)):
                refusal = self._add(i, name, request, alone=len(requests) == 1)
                if refusal is None:
                    added.append(name)
                else:
                    buffer.put(refusal)
        except BaseException:
            for name in added:
                self._engine.abort_request(name)
            raise
        self._buffers |= dict.fromkeys(added, buffer)
        return buffer

    def close_stream(self, buffer: StreamBuffer) -> None:
        """Abort a stream's unfinished requests."""
        for name in buffer.live:
            self._buffers.pop(name, None)
            self._engine.abort_request(name)
        buffer.live.clear()

    def abandon(self, buffer: StreamBuffer) -> None:
        """Close a stream before the next step. Any thread may call this without the lock."""
        self._abandoned.append(buffer)

    def close(self) -> None:
        """Abort the unfinished requests of all streams."""
        for buffer in set(self._buffers.values()):
            self.close_stream(buffer)

    def _add(self, i: int, name: str, request: NewRequest, *, alone: bool) -> RequestOutput | None:
        """Add a request. If it is refused, raise if it is ``alone``, else return an output with the
        error."""
        prompt = request.prompt
        try:
            if isinstance(prompt, InvalidRequestError):
                raise prompt
            assert prompt.token_ids is not None
            self._engine.add_request(
                name,
                prompt.token_ids,
                request.params,
                prompt=prompt.text,
                priority=request.priority,
                **request.options,
            )
        except InvalidRequestError as error:
            if alone:
                raise
            return _refused(i, name, prompt, error)
        return None

    def _step(self, waiting: set[str], done: dict[str, RequestOutput], progress: Progress) -> None:
        if not (self._engine.has_unfinished_requests() or self._engine.is_paused()):
            raise RuntimeError(f"the engine lost {len(waiting)} requests; report this")
        progress.show()
        for output in self.step():
            if output.finished and output.request_id in waiting:
                waiting.discard(output.request_id)
                done[output.request_id] = output
                progress.count(output)


def new_requests(
    prompts: "list[Prompt | InvalidRequestError]",
    every: list[SamplingParams],
    priority: int | Sequence[int] | None,
    **options: Any,
) -> list[NewRequest]:
    """The requests of a call.

    Args:
        prompts: each prompt with its token ids, or the error that refuses it.
        every: parameters of each prompt.
        priority: one priority for all prompts, or one for each; None is 0.
        options: further arguments of the engine's ``add_request``; None values are left out.

    Raises:
        InvalidRequestError: the only prompt is refused, or the number of priorities differs from
            that of the prompts.
    """
    order = priorities_of(priority, len(prompts))
    if len(prompts) == 1:
        raise_first_refusal(prompts)
    more = {name: value for name, value in options.items() if value is not None}
    return [NewRequest(*each, more) for each in zip(prompts, every, order, strict=True)]


def priorities_of(given: int | Sequence[int] | None, count: int) -> Sequence[int]:
    """The priority of each of ``count`` prompts, of one for all or one for each; None is 0.

    Raises:
        InvalidRequestError: their number differs from that of the prompts.
    """
    order = [given or 0] * count if isinstance(given, int | None) else given
    if len(order) != count:
        raise InvalidRequestError(
            f"{len(order)} priorities for {count} prompts; give one per prompt"
        )
    return order


def params_per_prompt(
    given: Any, count: int, default: Callable[[], SamplingParams], kind: RequestOutputKind
) -> list[SamplingParams]:
    """Sampling parameters of each prompt, with output kind ``kind``.

    Args:
        given: one SamplingParams, a list with one per prompt, or None.
        count: number of prompts.
        default: gives the parameters for None.
        kind: kind of the outputs.

    Raises:
        InvalidRequestError: ``given`` has another type or length, or an ``output_kind`` that
            contradicts the call.
    """
    if given is None:
        given = default()
    if isinstance(given, SamplingParams):
        every = [given] * count
    else:
        every = list(given) if isinstance(given, Sequence) else [given]
        if not all(isinstance(params, SamplingParams) for params in every):
            raise InvalidRequestError(
                "sampling_params holds something other than SamplingParams; give one, or a "
                "list with one per prompt"
            )
    if len(every) != count:
        raise InvalidRequestError(
            f"{len(every)} sampling_params for {count} prompts; give one, or one per prompt"
        )
    clones = {id(params): params.clone() for params in every}
    every = [clones[id(params)] for params in every]
    kinds = {params.output_kind for params in every}
    if kind is RequestOutputKind.FINAL_ONLY and RequestOutputKind.DELTA in kinds:
        raise InvalidRequestError(
            "output_kind=DELTA is for streaming; generate returns whole outputs: leave "
            "output_kind as it is, or call stream"
        )
    if kind is RequestOutputKind.DELTA and RequestOutputKind.FINAL_ONLY in kinds:
        raise InvalidRequestError(
            "output_kind=FINAL_ONLY is not for streaming; leave output_kind as it is, or call "
            "generate"
        )
    same_kind = {id(p): dataclasses.replace(p, output_kind=kind) for p in every}
    return [same_kind[id(p)] for p in every]


def default_sampling_params(tokenizer: Tokenizer | None) -> SamplingParams:
    """The checkpoint's default parameters, or `SamplingParams()` if it has none."""
    return SamplingParams(**(tokenizer.generation.sampling if tokenizer else {}))


def _refused(
    index: int, name: str, prompt: "Prompt | InvalidRequestError", error: InvalidRequestError
) -> RequestOutput:
    known = prompt if isinstance(prompt, Prompt) else Prompt(None, None)
    named = type(error)(f"prompts[{index}]: {error}")
    named.__cause__ = without_frames(error)
    ended = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(named))
    return RequestOutput(
        name, known.text, known.token_ids or [], outputs=[ended], finished=True, error=named
    )
