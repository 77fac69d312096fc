"""ReceivedRequest: makes the outputs of a request from what its engine process sends."""

import logging
from typing import Any

from rjax.engine.best_samples import best_samples
from rjax.engine.completion import token_texts
from rjax.engine.completion_text import CompletionText
from rjax.engine_channel.error_codec import unpack_error
from rjax.engine_channel.output_codec import Packed
from rjax.engine_channel.value_codec import pack_params
from rjax.errors import without_frames
from rjax.outputs import (
    CompletionOutput,
    FinishReason,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer

_log = logging.getLogger(__name__)


class ReceivedRequest:
    """A request of a front end, which has its text: the engine process has its tokens only.

    The engine sends new tokens. This class detokenises them, finds stop strings, and gives outputs
    of the kind that was asked for. The engine still makes a few tokens after a stop string, which
    are dropped; the sample ends with the engine's next message, so that its last output has the
    engine's figures.

    Args:
        params: the request's sampling parameters.
        prompt: the prompt's text, if it is known.
        token_ids: token ids of the prompt.
        tokenizer: the model's tokenizer; None where the engine serves token ids only.

    Attributes:
        stopped: samples that ended here since this list was last cleared; the engine is to be told.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: str | None,
        token_ids: list[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._params = params
        self._kind = params.output_kind
        self._prompt = prompt
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._metrics: RequestMetrics | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._version: int | None = None  # of the weights, at the first token
        self._error: Exception | None = None
        self._failure: Exception | None = None  # of a text
        self._samples: list[_Sample] = []
        self._detokenizes = tokenizer is not None and params.detokenize
        self._sends_every_step = self._kind is not RequestOutputKind.FINAL_ONLY or (
            self._detokenizes and bool(params.stop_strings)
        )
        self._has_stopped = False
        # Whether most outputs are those of `_Sample.delta`.
        self._is_plain = (
            params.output_kind is RequestOutputKind.DELTA
            and params.n == 1
            and not params.stop_strings
        )
        self.stopped: list[int] = []

    def sent_params(self) -> dict[str, Any]:
        """Packed parameters for the engine, which gets no text. Where it sends every step it sends
        all samples, from which the best are chosen here."""
        packed = pack_params(self._params)
        if self._detokenizes:
            packed.pop("stop", None)
            packed["detokenize"] = False
        if self._sends_every_step:
            packed["output_kind"] = RequestOutputKind.DELTA.value
            if self._params.num_sequences > self._params.n:
                packed |= {"n": packed.pop("best_of"), "logprobs": self._params.logprobs or 0}
        return packed

    def unpack(self, packed: Packed) -> RequestOutput | None:
        """The next output, of what `rjax.engine_channel.output_codec.SentRequest.pack` made; None
        if there is nothing to report now."""
        request_id, completions, finished, num_cached, more = packed
        if more is not None:
            metrics, logprobs, error, prompt = more
            self._metrics = None if metrics is None else RequestMetrics(*metrics)
            self._prompt_logprobs = self._unpack_prompt_logprobs(logprobs)
            self._error = self._failure if error is None else unpack_error(error)
            self._token_ids = self._token_ids if prompt is None else prompt
        elif self._is_plain and len(completions[0]) == 2:
            try:
                output = self._samples[0].delta(completions[0][1], self._version)
            except Exception as failure:
                self._fail(self._samples[0], failure)
                self.stopped.append(0)
                return None
            return RequestOutput(
                request_id,
                self._prompt,
                self._token_ids,
                self._prompt_logprobs,
                [output],
                False,
                self._metrics,
                num_cached,
                self._error,
            )
        if not self._samples:
            self._samples = [self._new_sample(one[0]) for one in completions]
        for sample, one in zip(self._samples, completions, strict=True):
            self._add(sample, *one)
        kind = self._kind
        if not finished and (
            kind is RequestOutputKind.FINAL_ONLY
            or (len(self._samples) == 1 and self._samples[0].is_ending)
        ):
            return None
        outputs = [sample.output(kind) for sample in self._samples]
        if len(outputs) > self._params.n:
            outputs = best_samples(outputs, self._params)
        if finished and self._has_stopped and self._metrics is not None:
            self._metrics.num_generated_tokens = max([s.num_tokens for s in self._samples])
        return RequestOutput(
            request_id,
            self._prompt,
            self._token_ids,
            self._prompt_logprobs,
            outputs,
            finished,
            self._metrics,
            num_cached,
            self._error,
        )

    def _new_sample(self, index: int) -> "_Sample":
        text = None
        if self._detokenizes:
            assert self._tokenizer is not None
            text = CompletionText(self._params, self._tokenizer, self._token_ids)
        return _Sample(index, text)

    def _add(
        self,
        sample: "_Sample",
        index: int,
        token_ids: list[int],
        cumulative_logprob: float | None = None,
        logprobs: Any = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: Any = None,
        versions: list[int] | None = None,
    ) -> None:
        """Add what the engine sent of a sample."""
        if versions and self._version is None:
            self._version = versions[0]
        if versions is None and self._version is not None:
            versions = [self._version] * len(token_ids)
        if sample.finish_reason is not None:
            return
        if not sample.is_ending:
            new = None
            if logprobs is not None:
                new = FlatLogprobs(token_texts(self._tokenizer), *logprobs)
            try:
                sample.add(token_ids, new, cumulative_logprob, finish_reason, versions)
            except Exception as failure:
                self._fail(sample, failure)
            if sample.end is not None:
                self._has_stopped = True
                if finish_reason is None:
                    self.stopped.append(index)
        if finish_reason is not None:
            sample.finish_reason, sample.stop_reason = sample.end or (finish_reason, stop_reason)
            if error is not None:
                sample.error = unpack_error(error)

    def _fail(self, sample: "_Sample", error: Exception) -> None:
        """End a sample on an error in its text; to be called where the error was caught."""
        self._has_stopped, self._is_plain = True, False
        _log.error("a request failed", exc_info=error)
        self._error = self._failure = sample.error = without_frames(error)
        sample.end = "error", str(error)

    def _unpack_prompt_logprobs(self, packed: Any) -> list[dict[int, Logprob] | None] | None:
        if packed is None:
            return None
        text = token_texts(self._tokenizer)
        return [
            None if entry is None else {i: Logprob(x, rank, text(i)) for i, x, rank in entry}
            for entry in packed
        ]


class _Sample:
    """One sample of a request.

    Args:
        index: index of the sample in the request.
        text: text of its tokens; None if it is not wanted.

    Attributes:
        end: finish reason and stop reason of a sample that ended here; None before.
        finish_reason, stop_reason, error: fields of its `CompletionOutput`, set once the engine
            ended it too.
        num_tokens: number of tokens so far.
    """

    __slots__ = (
        *("_cumulative_logprob", "_index", "_logprobs", "_text", "_token_ids", "_versions", "end"),
        *("error", "finish_reason", "num_tokens", "stop_reason"),
    )

    def __init__(self, index: int, text: CompletionText | None) -> None:
        self._index = index
        self._text = text
        self._token_ids: list[int] = []
        self._versions: list[int] = []
        self._logprobs: FlatLogprobs | None = None
        self._cumulative_logprob: float | None = None
        self.num_tokens = 0
        self.end: tuple[FinishReason, str] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None

    @property
    def is_ending(self) -> bool:
        """Whether it ended here and the engine has not ended it yet."""
        return self.end is not None and self.finish_reason is None

    def add(
        self,
        token_ids: list[int],
        logprobs: FlatLogprobs | None,
        cumulative_logprob: float | None,
        finish_reason: FinishReason | None,
        versions: list[int] | None,
    ) -> None:
        """Add tokens up to a stop string, with the engine's reason if they are the last."""
        if self._text is not None:
            count = self._add_text(self._text, token_ids, finish_reason)
            if count < len(token_ids):
                token_ids = token_ids[:count]
                logprobs = None if logprobs is None else logprobs[:count]
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        if versions is not None:
            self._versions += versions[: len(token_ids)]
        if logprobs is None:
            self._cumulative_logprob = cumulative_logprob
            return
        total = self._cumulative_logprob or 0.0
        for logprob in logprobs.sampled():  # not sum(), which rounds otherwise than the engine
            total += logprob
        self._cumulative_logprob = total
        if self._logprobs is None:
            self._logprobs = logprobs
        else:
            self._logprobs += logprobs

    def delta(self, token_ids: list[int], version: int | None) -> CompletionOutput:
        """`add` tokens without logprobs, where there are no stop strings, and their `output`."""
        self.num_tokens += len(token_ids)
        text = "" if self._text is None else self._text.stream(token_ids)
        versions = None if version is None else [version] * len(token_ids)
        return CompletionOutput(self._index, text, token_ids, weights_versions=versions)

    def _add_text(
        self, text: CompletionText, token_ids: list[int], finish_reason: FinishReason | None
    ) -> int:
        """Add the text of the tokens; return how many of them belong to the sample."""
        # The engine knows no stop strings: it stops at a token.
        end_token = token_ids[-1] if finish_reason == "stop" else None
        shown = token_ids if end_token is None else token_ids[:-1]
        for count, token_id in enumerate(shown, start=1):
            stop = text.add(token_id)
            if stop is not None:
                self.end = "stop", stop
                return count
        if finish_reason is not None and finish_reason != "error":
            stop = text.end(end_token)
            if stop is not None:
                self.end = "stop", stop
        return len(token_ids)

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """The output so far, or with DELTA the part since the last one."""
        text, token_ids, logprobs = "", self._token_ids, self._logprobs
        versions = self._versions
        if kind is not RequestOutputKind.DELTA:
            text = "" if self._text is None else self._text.text
            token_ids = token_ids[:]
            logprobs = None if logprobs is None else logprobs[:]
            versions = versions[:]
        elif self.is_ending:  # the rest comes with the reason
            token_ids = []
            logprobs = None if logprobs is None else logprobs[:0]
            versions = []
        else:
            text = "" if self._text is None else self._text.take()
            self._token_ids = []
            self._versions = []
            self._logprobs = None if logprobs is None else logprobs[:0]
        # Positional arguments, for speed: one is made for every token of a stream.
        return CompletionOutput(
            self._index,
            text,
            token_ids,
            self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
            versions if len(versions) == len(token_ids) else None,
        )
