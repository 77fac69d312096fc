"""What a request gives back: text, tokens, log-probabilities and timings, shaped as in vLLM."""

import dataclasses
from typing import Literal

type FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(slots=True)  # frozen ones take three times as long to make
class Logprob:
    """One token's log-probability at one position.

    Attributes:
        logprob: natural log of the probability.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the token's text alone; U+FFFD where it is part of a character. None where
            the engine has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        index: 0 to n-1 within the request.
        text: the generated text; empty where the request or the engine does not detokenise.
        token_ids: the generated tokens, the one that ended the sequence included.
        cumulative_logprob: sum over the sampled tokens; None unless logprobs or ``best_of`` were
            asked for.
        logprobs: for each token, log-probabilities by token id, the sampled token always among
            them; None unless asked for.
        finish_reason: "stop" (end-of-sequence token, stop token or stop string), "length",
            "abort", "error", or None while running.
        stop_reason: the stop token id or stop string that ended it, or the message of the error;
            None for end-of-sequence.
        error: what ended it with ``finish_reason`` "error"; a `rjax.errors.GrammarFailedError` if
            its grammar failed. Otherwise None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Moments of a request's life, in seconds of ``time.monotonic``; None where not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generated_tokens: int = 0
    """Tokens of the longest sequence; with n > 1 the sequences are generated side by side."""
    num_preemptions: int = 0
    """Times that its sequences gave up their pages."""
    num_shared_tokens: int = 0
    """Tokens that its sequences found in pages which other live sequences held, at their start."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens after the first; None with fewer than two."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        if self.num_generated_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_generated_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """What is known of one request.

    Attributes:
        request_id: chosen by the engine's caller, unique among live requests.
        prompt: the prompt's text as given; None for a prompt of token ids.
        prompt_token_ids: the tokens the model read, a configured system prompt included.
        prompt_logprobs: for each prompt token, log-probabilities by token id; None for the first,
            which nothing precedes. None as a whole unless asked for.
        outputs: one per sequence, with ``best_of`` the best ones alone. A refused prompt has one,
            with ``finish_reason`` "error", no text, and the message in ``stop_reason``.
        finished: no further output will come.
        num_cached_tokens: leading prompt tokens whose KV was already there.
        error: why a prompt of a list was refused, an `InvalidRequestError`; why a prompt could not
            be kept as a prefix, an `OutOfMemoryError`; or what ended a sample with
            ``finish_reason`` "error"; otherwise None.
        prompt_index: place of the prompt in the list that `LLM` was given; 0 elsewhere.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = dataclasses.field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None
    prompt_index: int = 0
