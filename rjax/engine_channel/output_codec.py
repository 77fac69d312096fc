"""Outputs of requests as plain values, without what the front end knows already.

An output is ``[request_id, completions, finished, num_cached_tokens, more]``, and a completion
``[index, text, token_ids]`` with what else is not None. ``more`` is None except in the first and in
the last output of a request.
"""

from typing import Any

from rjax.engine_channel.error_codec import pack_error, unpack_error
from rjax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind

type _Packed = list[Any] | tuple[Any, ...]
_METRICS = RequestMetrics.__slots__


class SentRequest:
    """What the engine process knows of a request while it packs its outputs.

    Args:
        kind: of its outputs.
        num_tokens: of the prompt as the front end sent it.
    """

    __slots__ = ("kind", "num_tokens", "started")

    def __init__(self, kind: RequestOutputKind, num_tokens: int) -> None:
        self.kind = kind
        self.num_tokens = num_tokens
        self.started = False

    def pack(self, output: RequestOutput) -> _Packed:
        """An output of this request as plain values."""
        more = None
        if not self.started or output.finished:
            self.started = True
            metrics, prompt = output.metrics, output.prompt_token_ids
            more = (
                None if metrics is None else [getattr(metrics, name) for name in _METRICS],
                _pack_logprobs(output.prompt_logprobs),
                None if output.error is None else pack_error(output.error),
                None if len(prompt) == self.num_tokens else prompt,
            )
        completions = [_pack_completion(completion) for completion in output.outputs]
        return output.request_id, completions, output.finished, output.num_cached_tokens, more


class ReceivedRequest:
    """What the front end knows of a request while it unpacks its outputs.

    Args:
        prompt: the prompt's text, if it is known.
        token_ids: of the prompt.
    """

    __slots__ = ("_error", "_metrics", "_prompt", "_prompt_logprobs", "_token_ids")

    def __init__(self, prompt: str | None, token_ids: list[int]) -> None:
        self._prompt = prompt
        self._token_ids = token_ids
        self._metrics: RequestMetrics | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._error: Exception | None = None

    def unpack(self, packed: _Packed) -> RequestOutput:
        """The output of `SentRequest.pack`."""
        request_id, completions, finished, num_cached, more = packed
        if more is not None:
            metrics, logprobs, error, prompt = more
            self._metrics = None if metrics is None else RequestMetrics(*metrics)
            self._prompt_logprobs = _unpack_logprobs(logprobs)
            self._error = None if error is None else unpack_error(error)
            self._token_ids = self._token_ids if prompt is None else prompt
        # Positional arguments, for speed: one is made for every token of a stream.
        return RequestOutput(
            request_id,
            self._prompt,
            self._token_ids,
            self._prompt_logprobs,
            [
                CompletionOutput(*packed) if len(packed) == 3 else _unpack_completion(*packed)
                for packed in completions
            ],
            finished,
            self._metrics,
            num_cached,
            self._error,
        )


def _pack_completion(completion: CompletionOutput) -> _Packed:
    start = completion.index, completion.text, completion.token_ids
    if completion.logprobs is None and completion.finish_reason is None:
        return start
    return (
        *start,
        completion.cumulative_logprob,
        _pack_logprobs(completion.logprobs),
        completion.finish_reason,
        completion.stop_reason,
        None if completion.error is None else pack_error(completion.error),
    )


def _unpack_completion(
    index: int,
    text: str,
    token_ids: list[int],
    cumulative_logprob: float | None = None,
    logprobs: Any = None,
    finish_reason: Any = None,
    stop_reason: int | str | None = None,
    error: Any = None,
) -> CompletionOutput:
    return CompletionOutput(
        index,
        text,
        token_ids,
        cumulative_logprob,
        _unpack_logprobs(logprobs),
        finish_reason,
        stop_reason,
        None if error is None else unpack_error(error),
    )


def _pack_logprobs(positions: Any) -> list[_Packed | None] | None:
    if positions is None:
        return None
    return [
        None
        if position is None
        else [(i, p.logprob, p.rank, p.decoded_token) for i, p in position.items()]
        for position in positions
    ]


def _unpack_logprobs(packed: Any) -> Any:
    if packed is None:
        return None
    return [
        None if position is None else {i: Logprob(x, rank, text) for i, x, rank, text in position}
        for position in packed
    ]
