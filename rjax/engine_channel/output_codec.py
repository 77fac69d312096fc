"""Outputs of requests as plain values, without what the front end knows already.

An output is ``[request_id, completions, finished, num_cached_tokens, more]``, and a completion
``[index, token_ids]`` with what else is not None. ``more`` is None except in the first and in the
last output of a request. Texts are made by the front end. Versions of the weights are sent with the
first tokens of a request, and with tokens that have others than its first token.
"""

from typing import Any

from rjax.engine_channel.error_codec import pack_error
from rjax.outputs import CompletionOutput, FlatLogprobs, RequestMetrics, RequestOutput

type Packed = list[Any] | tuple[Any, ...]
_METRICS = RequestMetrics.__slots__


class SentRequest:
    """The state of a request in the engine process while it packs its outputs.

    Args:
        num_tokens: number of tokens of the prompt as the front end sent it.
    """

    __slots__ = ("num_tokens", "started", "version")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.started = False
        self.version: int | None = None

    def pack(self, output: RequestOutput) -> Packed:
        """An output of this request as plain values."""
        more = None
        if not self.started or output.finished:
            self.started = True
            metrics, prompt = output.metrics, output.prompt_token_ids
            more = (
                None if metrics is None else [getattr(metrics, name) for name in _METRICS],
                _pack_prompt_logprobs(output),
                None if output.error is None else pack_error(output.error),
                None if len(prompt) == self.num_tokens else prompt,
            )
        completions = [self._pack_completion(completion) for completion in output.outputs]
        return output.request_id, completions, output.finished, output.num_cached_tokens, more

    def _pack_completion(self, completion: CompletionOutput) -> Packed:
        start = completion.index, completion.token_ids
        logprobs, versions = completion.logprobs, self._versions(completion.weights_versions)
        if logprobs is None and completion.finish_reason is None and versions is None:
            return start
        assert logprobs is None or isinstance(logprobs, FlatLogprobs)
        return (
            *start,
            completion.cumulative_logprob,
            None
            if logprobs is None
            else (logprobs.ends, logprobs.token_ids, logprobs.logprobs, logprobs.ranks),
            completion.finish_reason,
            completion.stop_reason,
            None if completion.error is None else pack_error(completion.error),
            versions,
        )

    def _versions(self, versions: list[int] | None) -> list[int] | None:
        """Versions of the weights, unless they are those of the first token; they only grow."""
        if not versions or versions[0] == versions[-1] == self.version:
            return None
        if self.version is None:
            self.version = versions[0]
        return versions


def _pack_prompt_logprobs(output: RequestOutput) -> list[Packed | None] | None:
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else [(i, one.logprob, one.rank) for i, one in entry.items()]
        for entry in output.prompt_logprobs
    ]
