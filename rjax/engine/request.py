"""A request: n sequences of one prompt, and its output."""

import dataclasses
import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np
from jaxtyping import Int32

from rjax.batch.page_hash import PageHashes
from rjax.batch.sequence import Sequence
from rjax.batch.step_readout import HostLogprobs
from rjax.batch.token_mask import TokenMask
from rjax.engine.best_samples import best_samples
from rjax.engine.completion import Completion, StepLogprobs, logprob_entry, token_texts
from rjax.errors import without_frames
from rjax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams, sequence_seed
from rjax.tokenization import Tokenizer

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """The live state of one request.

    Attributes:
        request_id: unique among live requests.
        prompt: the prompt's text as given, or None.
        params: the validated parameters.
        sequences: one for each sample.
        completions: the output of each sample.
        metrics: times and counts for the caller.
        tokenizer: None if the engine serves token ids only.
        prompt_logprobs: one entry for each prompt token read so far; None unless asked for.
        deadline: time of ``time.monotonic`` at which it is aborted, or None.
        cache_salt: its cache salt, or None.
        error: why its prompt could not be kept as a prefix, or what ended it.
        wants_every_step: whether its caller gets an output after every token, not only the last.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams
    sequences: list[Sequence]
    completions: list[Completion]
    metrics: RequestMetrics
    tokenizer: Tokenizer | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    error: Exception | None = None
    wants_every_step: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.wants_every_step = self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @classmethod
    def start(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        prompt_array: Int32[np.ndarray, " T"],
        params: SamplingParams,
        *,
        prompt: str | None,
        max_tokens: int,
        seed: int,
        order: tuple[int, int],
        root: bytes,
        page_size: int,
        masks: Tokens[TokenMask],
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        deadline: float | None,
        logprob_start_len: int,
        prompt_temperature: float,
        cache_salt: str | None,
        weights_version: int,
    ) -> "Request":
        """A request that arrives now.

        ``order`` is that of its sequences, ``root`` the first key of their chains.
        """
        each = params.each_sequence()
        now = time.monotonic()
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt_token_ids,
                prompt_array=prompt_array,
                params=each,
                max_tokens=max_tokens,
                seed=sequence_seed(seed, index),
                order=(*order, index),
                hashes=PageHashes(root, page_size),
                mask=masks[index] if masks else None,
                logprob_start_len=logprob_start_len,
                prompt_temperature=prompt_temperature,
                arrival_time=now,
            )
            for index in range(params.num_sequences)
        ]
        for sequence in sequences:
            sequence.siblings = sequences
        completions = [
            Completion(
                index,
                each,
                tokenizer=tokenizer,
                eos_token_ids=eos,
                max_tokens=max_tokens,
                prompt_token_ids=prompt_token_ids,
                weights_version=weights_version,
            )
            for index in range(params.num_sequences)
        ]
        unreported: list[dict[int, Logprob] | None] = [None] * max(logprob_start_len, 1)
        return cls(
            request_id=request_id,
            prompt=prompt,
            params=params,
            sequences=sequences,
            completions=completions,
            metrics=RequestMetrics(arrival_time=now),
            tokenizer=tokenizer,
            prompt_logprobs=None if params.prompt_logprobs is None else unreported,
            deadline=deadline,
            cache_salt=cache_salt,
        )

    @property
    def has_started(self) -> bool:
        """Whether one of its sequences has been given pages."""
        return any([sequence.num_cached is not None for sequence in self.sequences])

    @property
    def finished(self) -> bool:
        """Whether all its sequences are finished."""
        if len(self.completions) == 1:
            return self.completions[0].finish_reason is not None
        return all([completion.finished for completion in self.completions])

    def abort(self) -> None:
        """End its unfinished samples."""
        for completion in self.completions:
            try:
                completion.abort()
            except Exception as error:  # in its text; it affects no other request
                _log.exception("request %s failed", self.request_id)
                completion.finish_reason, completion.stop_reason = "error", str(error)
                self.error = without_frames(error)

    def fail(self, error: Exception, samples: list[int]) -> None:
        """End these samples on an error. Call it where the error was caught."""
        _log.error("request %s failed", self.request_id, exc_info=error)
        self.error = without_frames(error)
        for completion in (self.completions[index] for index in samples):
            if not completion.finished:
                completion.finish_reason, completion.stop_reason = "error", str(error)
                completion.error = error

    def take_prompt_logprobs(self, start: int, found: HostLogprobs, rows: slice) -> None:
        """Add the logprobs of the prompt tokens that follow positions ``start``, ``start`` + 1, ...
        in these rows of a step.

        Known ones are kept: after a preemption a prompt may be computed again.
        """
        known, limit = self.prompt_logprobs, self.params.prompt_logprobs
        if known is None:
            return
        prompt = self.sequences[0].prompt_token_ids
        offset, first = rows.start - (start + 1), len(known)
        rows = slice(max(offset + first, rows.start), min(offset + len(prompt), rows.stop))
        if rows.start != offset + first or rows.start >= rows.stop:
            return
        tokens = prompt[first : first + rows.stop - rows.start]
        if limit:
            steps = step_logprobs(found, rows, [limit])
            known += [
                logprob_entry(token, step, limit, self.tokenizer)
                for token, step in zip(tokens, steps, strict=True)
            ]
        else:  # without alternatives, for speed: trainers score very many tokens
            text = token_texts(self.tokenizer)
            values, ranks = found.logprob[rows].tolist(), found.rank[rows].tolist()
            known += [
                {token: Logprob(value, rank, text(token))}
                for token, value, rank in zip(tokens, values, ranks, strict=True)
            ]

    def snapshot(self) -> RequestOutput:
        """The output now, in the form of ``params.output_kind``."""
        finished = self.finished
        if finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
            self.metrics.num_generated_tokens = max(len(c.token_ids) for c in self.completions)
            self.metrics.num_preemptions = sum(s.num_preemptions for s in self.sequences)
            self.metrics.num_shared_tokens = sum(s.num_shared for s in self.sequences)
        first = self.sequences[0]
        # Positional arguments, for speed: one is made for every token of a stream.
        return RequestOutput(
            self.request_id,
            self.prompt,
            first.prompt_token_ids,
            self.prompt_logprobs,
            self._outputs(),
            finished,
            self.metrics,
            first.num_cached or 0,
            self.error,
        )

    def _outputs(self) -> list[CompletionOutput]:
        """Its samples, or the best ``n`` of them with ``best_of``."""
        kind = self.params.output_kind
        found = [c.snapshot(kind) for c in self.completions]
        return found if len(found) == self.params.n else best_samples(found, self.params)


def step_logprobs(
    found: HostLogprobs | None, rows: slice, asked: Iterable[int | None]
) -> list[StepLogprobs]:
    """Log-probabilities of rows of a step, with as many alternatives as the most that are asked."""
    wanted = [count for count in asked if count is not None]
    if found is None or not wanted:
        return []
    most = None if min(wanted) < 0 else max(wanted)
    return [
        StepLogprobs(*row)
        for row in zip(
            found.logprob[rows].tolist(),
            found.rank[rows].tolist(),
            found.top_ids[rows, :most].tolist(),
            found.top_logprobs[rows, :most].tolist(),
            strict=True,
        )
    ]
