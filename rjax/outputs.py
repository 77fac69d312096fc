"""What a request gives back: text, tokens, log-probabilities and timings, shaped as in vLLM."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

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


type TokenChance = tuple[int, float, int]
"""A token, its log-probability and its rank."""


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities at consecutive positions, in flat lists, as in vLLM.

    A mapping from token id to `Logprob` is made where a position is read. The object is equal to
    the list of these mappings, and pickled as that list.

    Args:
        token_text: text of a token, for `Logprob.decoded_token`.
        ends: where the entries of each position end.
        token_ids, logprobs, ranks: one value for each entry; the sampled token's entry is the first
            of its position.
    """

    __slots__ = ("_token_text", "ends", "logprobs", "ranks", "token_ids")

    def __init__(
        self,
        token_text: Callable[[int], str | None],
        ends: list[int] | None = None,
        token_ids: list[int] | None = None,
        logprobs: list[float] | None = None,
        ranks: list[int] | None = None,
    ) -> None:
        self._token_text = token_text
        self.ends: list[int] = [] if ends is None else ends
        self.token_ids: list[int] = [] if token_ids is None else token_ids
        self.logprobs: list[float] = [] if logprobs is None else logprobs
        self.ranks: list[int] = [] if ranks is None else ranks

    def add(self, token: TokenChance, top_ids: list[int], top_logprobs: list[float]) -> None:
        """Add a position: the sampled token, then those of the likeliest ones, best first, that are
        other tokens."""
        sampled, logprob, rank = token
        # Whole lists at once, for speed: one position is added for every token.
        at = top_ids.index(sampled) if sampled in top_ids else len(top_ids)
        self.token_ids += [sampled, *top_ids[:at], *top_ids[at + 1 :]]
        self.logprobs += [logprob, *top_logprobs[:at], *top_logprobs[at + 1 :]]
        self.ranks += [rank, *range(1, at + 1), *range(at + 2, len(top_ids) + 1)]
        self.ends.append(len(self.token_ids))

    def sampled(self) -> list[float]:
        """Log-probabilities of the sampled tokens."""
        starts = [0, *self.ends[:-1]] if self.ends else []
        return [self.logprobs[start] for start in starts]

    def chances(self) -> list[list[TokenChance]]:
        """The entries of each position, without their texts."""
        flat = list(zip(self.token_ids, self.logprobs, self.ranks, strict=True))
        start, found = 0, []
        for end in self.ends:
            found.append(flat[start:end])
            start = end
        return found

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        if not isinstance(index, slice):
            place = range(len(self.ends))[index]
            return next(iter(self[place : place + 1]))
        first, last, step = index.indices(len(self.ends))
        if step != 1:
            found = FlatLogprobs(self._token_text)
            for place in range(first, last, step):
                found += self[place : place + 1]
            return found
        last = max(first, last)
        start = self.ends[first - 1] if first else 0
        end = self.ends[last - 1] if last else 0
        return FlatLogprobs(
            self._token_text,
            [other - start for other in self.ends[first:last]],
            self.token_ids[start:end],
            self.logprobs[start:end],
            self.ranks[start:end],
        )

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        text = self._token_text
        for entries in self.chances():
            yield {i: Logprob(x, rank, text(i)) for i, x, rank in entries}

    def __add__(self, other: Sequence[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*self, *other]

    def __radd__(self, other: list[dict[int, Logprob]]) -> list[dict[int, Logprob]]:
        return [*other, *self]

    def __iadd__(self, other: "FlatLogprobs") -> "FlatLogprobs":
        start = len(self.token_ids)
        self.ends += [start + end for end in other.ends]
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.ranks += other.ranks
        return self

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


type SampleLogprobs = FlatLogprobs | list[dict[int, Logprob]]
"""Log-probabilities of a sample's tokens."""


def token_chances(logprobs: SampleLogprobs) -> list[list[TokenChance]]:
    """The entries of each position, without their texts."""
    if isinstance(logprobs, FlatLogprobs):
        return logprobs.chances()
    return [chances(entry) for entry in logprobs]


def num_entries(logprobs: SampleLogprobs) -> int:
    """Entries of all positions."""
    if isinstance(logprobs, FlatLogprobs):
        return len(logprobs.token_ids)
    return sum(map(len, logprobs))


def chances(entry: dict[int, Logprob]) -> list[TokenChance]:
    """The entries of one position, without their texts."""
    return [(token, found.logprob, found.rank) for token, found in entry.items()]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        index: 0 to n-1 within the request.
        text: the generated text; empty where the request or the engine does not detokenise.
        token_ids: the generated tokens, the one that ended the sequence included.
        cumulative_logprob: sum over the sampled tokens; None unless logprobs or ``best_of`` were
            asked for.
        logprobs: log-probabilities by token id for each token, the sampled token always among
            them; None unless asked for.
        finish_reason: "stop" (end-of-sequence token, stop token or stop string), "length",
            "abort", "error", or None while running.
        stop_reason: the stop token id or stop string that ended it, or the message of the error;
            None for end-of-sequence.
        error: what ended it with ``finish_reason`` "error"; a `rjax.errors.GrammarFailedError` if
            its grammar failed. Otherwise None.
        weights_versions: version of the weights that each token was computed with; None for a
            prompt that was refused.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    weights_versions: list[int] | None = None

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
        prompt_logprobs: log-probabilities by token id for each prompt token; None for the first,
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
