"""Beam search over the engine: each round generates one token of every beam.

Each beam of a round is a request for one token, which the engine batches with all other requests.
It finds its parent's pages in the prefix cache, shares the full ones and copies the partial one on
write. The algorithm, including early stopping, is that of transformers'
``generate(num_beams=...)``.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, no_type_check

from rjax.api.progress import Progress
from rjax.errors import ContextLengthError, InvalidRequestError
from rjax.outputs import CompletionOutput, Logprob, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.vllm.names import BEAM_FIELDS, with_refusals

type EarlyStopping = bool | Literal["never"]

_MOST_BEAMS = 64


@no_type_check  # ``__post_init__`` checks the values, with messages for users
@with_refusals(BEAM_FIELDS)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search; the constructor checks them.

    Attributes:
        beam_width: beams kept, and sequences returned; 1 to 64. ``max_logprobs`` of the engine must
            be at least (1 + number of ending tokens) times this, and at least twice this.
        max_tokens: most tokens to generate.
        length_penalty: exponent of the length by which scores are divided; above 0 favours long
            sequences, below 0 short ones.
        early_stopping: True stops when ``beam_width`` sequences have ended. False stops when, in
            addition, the best running beam at its present length scores no better than the worst of
            them. "never" stops when no running beam can score better.
        ignore_eos: do not end beams at the model's end-of-sequence tokens.
        stop_token_ids: further tokens that end a beam; at most 8.

    Raises:
        InvalidRequestError: a value of the wrong type or out of range.
    """

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, most in (("beam_width", _MOST_BEAMS), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise InvalidRequestError(f"{name} is {value!r}; give a whole number, 1 to {most}")
        penalty = self.length_penalty
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not number or not math.isfinite(penalty) or abs(penalty) > 10:
            raise InvalidRequestError(f"length_penalty is {penalty!r}; give a number, -10 to 10")
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f"early_stopping is {self.early_stopping!r}; choose True, False or 'never'"
            )
        ends = tuple(self.stop_token_ids)
        whole = all(isinstance(e, int) and not isinstance(e, bool) and e >= 0 for e in ends)
        if not whole or len(ends) > 8:
            raise InvalidRequestError(
                f"stop_token_ids is {self.stop_token_ids!r}; give at most 8 token ids"
            )
        object.__setattr__(self, "stop_token_ids", ends)


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """Tokens generated so far and the sum of their log-probabilities.

    ``logprobs`` has the alternatives of each token, if the search keeps them.
    """

    tokens: tuple[int, ...]
    total: float
    logprobs: tuple[dict[int, Logprob], ...] = ()


class BeamSearch:
    """The state of one prompt's search.

    Args:
        params: parameters of the search.
        ends: tokens that end a beam.
        num_logprobs: alternatives that beams keep for each token; None keeps nothing.

    Attributes:
        running: the beams to continue, best first; empty when the search is over.
        finished: (score, beam), best first, at most ``beam_width``.
    """

    def __init__(
        self, params: BeamSearchParams, ends: frozenset[int], num_logprobs: int | None = None
    ) -> None:
        self.running = [Beam((), 0.0)]
        self.finished: list[tuple[float, Beam]] = []
        self._params = params
        self._ends = ends
        self._num_logprobs = num_logprobs

    @property
    def num_candidates(self) -> int:
        """Candidates per round: enough to leave ``beam_width`` that do not end a beam."""
        return max(2, 1 + len(self._ends)) * self._params.beam_width

    def sampling_params(self) -> SamplingParams:
        """The request for the next token of one beam."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=self.num_candidates,
            logprobs_mode="raw_logprobs",
            ignore_eos=True,
            detokenize=self._num_logprobs is not None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def check_width(self, most: int) -> None:
        """Check that the engine gives enough alternatives per token.

        Raises:
            InvalidRequestError: more than ``most`` are needed.
        """
        if self.num_candidates > most:
            raise InvalidRequestError(
                f"a beam search of width {self._params.beam_width} with {len(self._ends)} ending "
                f"tokens looks at {self.num_candidates} next tokens; the engine gives {most}: "
                "raise max_logprobs or lower the width"
            )

    def advance(self, found: Sequence[dict[int, Logprob]]) -> None:
        """Extend the running beams by their most likely next tokens."""
        width = self._params.beam_width
        candidates = [
            (beam.total + entry.logprob, beam, token, entries)
            for beam, entries in zip(self.running, found, strict=True)
            for token, entry in entries.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        grown = [
            Beam((*beam.tokens, token), total, self._kept(beam, token, entries))
            for total, beam, token, entries in candidates[: self.num_candidates]
        ]
        length = len(self.running[0].tokens) + 1
        last = length >= self._params.max_tokens
        ended = [last or beam.tokens[-1] in self._ends for beam in grown]
        # An ended beam counts only if it is among the ``beam_width`` best candidates.
        new = [b for b, end in zip(grown[:width], ended, strict=False) if end]
        if not (self._is_full and self._params.early_stopping is True):
            scored = [(beam.total / length**self._params.length_penalty, beam) for beam in new]
            self.finished = sorted([*self.finished, *scored], key=lambda pair: -pair[0])[:width]
        running = [b for b, end in zip(grown, ended, strict=True) if not end][:width]
        self.running = running if running and self._may_improve(running[0], length) else []

    def _kept(
        self, beam: Beam, token: int, entries: dict[int, Logprob]
    ) -> tuple[dict[int, Logprob], ...]:
        """The logprobs of a beam with one more token."""
        if self._num_logprobs is None:
            return ()
        best = sorted(entries.items(), key=lambda item: item[1].rank)[: self._num_logprobs]
        return *beam.logprobs, {token: entries[token], **dict(best)}

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self._params.beam_width

    def _may_improve(self, best: Beam, length: int) -> bool:
        if not self._is_full:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        if self._params.early_stopping == "never" and penalty > 0:
            length = self._params.max_tokens
        return best.total / length**penalty > self.finished[-1][0]


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """A beam with its prompt, as in vLLM.

    Attributes:
        tokens: token ids of prompt and continuation.
        text: text of both; only the continuation's where the prompt was token ids.
        cum_logprob: sum over the tokens of the continuation.
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str


@dataclasses.dataclass(slots=True)
class BeamSearchOutput(RequestOutput):
    """What a beam search found for one prompt; ``outputs`` are the beams, best first."""

    @property
    def sequences(self) -> list[BeamSearchSequence]:
        """The beams with their prompt, best first."""
        return [
            BeamSearchSequence(
                self.prompt_token_ids + beam.token_ids,
                (self.prompt or "") + beam.text,
                beam.cumulative_logprob or 0.0,
                beam.finish_reason or "length",
            )
            for beam in self.outputs
        ]


def run_beam_search(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    name: str,
    step: Callable[[], list[RequestOutput]] | None = None,
    *,
    priorities: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> "list[BeamSearchOutput]":
    """Search for every prompt at once.

    Args:
        engine: an ``LLMEngine``; nothing else may step it during the search.
        prompts: token ids of each prompt.
        params: parameters of the search.
        name: unique prefix of the request ids.
        step: steps the engine and returns the outputs of these requests; ``engine.step`` by
            default.
        priorities: priority of each prompt; None is 0 for all.
        progress: bar that counts the prompts.

    Returns:
        One output per prompt. Its ``outputs`` are the beams, best first; ``cumulative_logprob`` is
        the sum of their log-probabilities.

    Raises:
        InvalidRequestError: the engine's limits do not allow this search. No request is left
            running.
    """
    eos = engine.tokenizer.eos_token_ids if engine.tokenizer and not params.ignore_eos else ()
    ends = frozenset((*eos, *params.stop_token_ids))
    searches = [BeamSearch(params, ends) for _ in prompts]
    for search in searches[:1]:
        search.check_width(engine.config.scheduler.max_logprobs)
    for prompt in prompts:
        if len(prompt) + params.max_tokens > engine.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {engine.max_model_len} tokens, and a "
                f"prompt has {len(prompt)} tokens and max_tokens {params.max_tokens}: shorten it, "
                "lower max_tokens or raise max_model_len"
            )
    waiting: dict[str, tuple[int, int]] = {}
    answers: list[dict[int, dict[int, Logprob]]] = [{} for _ in prompts]

    def start(i: int) -> None:
        for b, beam in enumerate(searches[i].running):
            request_id = f"{name}-{i}-{len(beam.tokens)}-{b}"
            tokens = [*prompts[i], *beam.tokens]
            sampling, priority = searches[i].sampling_params(), priorities[i] if priorities else 0
            engine.add_request(request_id, tokens, sampling, priority=priority)
            waiting[request_id] = i, b

    cached: dict[int, int] = {}
    found: dict[int, BeamSearchOutput] = {}

    def end(i: int) -> None:
        found[i] = BeamSearchOutput(
            request_id=f"{name}-{i}",
            prompt=None,
            prompt_token_ids=list(prompts[i]),
            outputs=_outputs(searches[i], ends, engine.tokenizer),
            finished=True,
            num_cached_tokens=cached[i],
        )
        if progress:
            progress.count(found[i])

    try:
        for i in range(len(prompts)):
            start(i)
        while waiting:
            for output in (step or engine.step)():
                place = waiting.pop(output.request_id, None) if output.finished else None
                if place is None:
                    continue
                i, b = place
                cached.setdefault(i, output.num_cached_tokens)
                logprobs = output.outputs[0].logprobs
                assert logprobs is not None, "every request asks for them"
                answers[i][b] = logprobs[0]
                if len(answers[i]) == len(searches[i].running):
                    searches[i].advance([answers[i][n] for n in range(len(answers[i]))])
                    answers[i] = {}
                    (start if searches[i].running else end)(i)
    finally:
        for request_id in waiting:
            engine.abort_request(request_id)
    return [found[i] for i in range(len(prompts))]


def _outputs(search: BeamSearch, ends: frozenset[int], tokenizer: Any) -> list[CompletionOutput]:
    return [
        CompletionOutput(
            index=index,
            text="" if tokenizer is None else tokenizer.decode(beam.tokens),
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.total,
            finish_reason="stop" if beam.tokens[-1] in ends else "length",
        )
        for index, (_, beam) in enumerate(search.finished)
    ]
