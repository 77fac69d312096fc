"""A request: n sequences of one prompt, and what its caller is told of them."""

import dataclasses
import time

from rjax.engine.completion import Completion, StepLogprobs, logprob_entry
from rjax.engine.sequence import Sequence
from rjax.outputs import Logprob, RequestMetrics, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """The live state of one request.

    Attributes:
        request_id: unique among live requests.
        prompt: text as given, or None.
        params: validated.
        sequences, completions: the engine's and the caller's side of each of the n samples.
        deadline: moment of ``time.monotonic`` at which it is aborted, or None.
        prompt_logprobs: one entry a prompt token as they come; None unless asked for.
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

    @classmethod
    def start(
        cls,
        sequences: list[Sequence],
        *,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        eos: frozenset[int],
        deadline: float | None,
    ) -> "Request":
        """A request of these sequences, which arrives now."""
        first = sequences[0]
        completions = [
            Completion(
                sequence.index,
                sequence.params,
                tokenizer=tokenizer,
                eos_token_ids=eos,
                max_tokens=sequence.max_tokens,
                prompt_token_ids=sequence.prompt_token_ids,
            )
            for sequence in sequences
        ]
        return cls(
            request_id=first.request_id,
            prompt=prompt,
            params=first.params,
            sequences=sequences,
            completions=completions,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            tokenizer=tokenizer,
            prompt_logprobs=None if first.params.prompt_logprobs is None else [None],
            deadline=deadline,
        )

    @property
    def finished(self) -> bool:
        """Whether all its sequences are."""
        return all([completion.finished for completion in self.completions])

    def take_prompt_logprobs(self, start: int, found: list[StepLogprobs]) -> None:
        """Add the logprobs of the prompt tokens that follow positions ``start``, ``start`` + 1, ...

        Those already known (the prompt was computed again after a preemption) are left alone.
        """
        known = self.prompt_logprobs
        if known is None:
            return
        prompt = self.sequences[0].prompt_token_ids
        for position, step in enumerate(found, start + 1):
            if position == len(known) < len(prompt):
                limit = self.params.prompt_logprobs
                known.append(logprob_entry(prompt[position], step, limit, self.tokenizer))

    def snapshot(self) -> RequestOutput:
        """The output now, as ``params.output_kind`` wants it."""
        finished = self.finished
        if finished and self.metrics.finished_time is None:
            self.metrics.finished_time = time.monotonic()
            self.metrics.num_preemptions = sum(s.num_preemptions for s in self.sequences)
            self.metrics.num_shared_tokens = sum(s.num_shared for s in self.sequences)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.sequences[0].prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[c.snapshot(self.params.output_kind) for c in self.completions],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.sequences[0].num_cached or 0,
        )

    @property
    def wants_every_step(self) -> bool:
        """Whether its caller is told of every token, not only of the end."""
        return self.params.output_kind != RequestOutputKind.FINAL_ONLY
