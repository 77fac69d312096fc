"""LiveRequests: gives the requests under way what each step computed, and ends them."""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows

from rjax.batch.scheduled_sequence import ScheduledSequence
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.batch.step_readout import StepReadout
from rjax.engine.completion import StepLogprobs
from rjax.engine.named_prefixes import NamedPrefixes
from rjax.engine.request import Request, step_logprobs
from rjax.engine.request_masks import RequestMasks
from rjax.engine.scheduler import Scheduler
from rjax.engine.stats import EngineStats
from rjax.outputs import RequestOutput

_FINISHED = SequenceStatus.FINISHED


class LiveRequests:
    """The requests under way.

    Args:
        scheduler: the scheduler of their sequences.
        prefixes: the prefixes that some of them compute.
        masks: the token masks of their samples.
        page_size: tokens of a page.
        stats: counts what they get and how they end.

    Attributes:
        by_id: the requests.
        stats: the statistics as given; may be replaced.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: NamedPrefixes,
        masks: RequestMasks,
        page_size: int,
        stats: EngineStats,
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.stats = stats
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._masks = masks
        self._page_size = page_size

    def take(self, batch: Rows[ScheduledSequence], result: StepReadout) -> list[RequestOutput]:
        """Add what a step computed for its batch; returns the outputs of requests with news."""
        updated: dict[str, Request] = {}
        row = 0
        tokens = result.tokens.tolist()  # padded at the end
        live = [s for s, _, _, samples, _ in batch if samples and s.status is not _FINISHED]
        self.stats.requests.count_tokens(live, time.monotonic())
        self.stats.output_tokens += len(live)
        asked = [s.params.logprobs for s in live]
        sampled = step_logprobs(result.sampled, slice(len(batch)), asked)
        for b, (sequence, start, stop, samples, _) in enumerate(batch):
            first_row = row
            row += stop - start
            if sequence.status is _FINISHED:
                continue
            request = self.by_id[sequence.request_id]
            try:
                if request.prompt_logprobs is not None and sequence.index == 0 and result.prompt:
                    request.take_prompt_logprobs(start, result.prompt, slice(first_row, row))
                if not samples:
                    continue
                wants = sampled and sequence.params.logprobs is not None
                logprobs = sampled[b] if wants else None
                finished = self._append(request, sequence, tokens[b], logprobs)
            except Exception as error:  # in its text or mask: only this sample ends
                self.fail(request, error, sequence if samples else None)
                finished = True
            if request.wants_every_step or (finished and request.finished):
                updated[sequence.request_id] = request
        self._masks.post()
        return self._news(updated.values())

    def _append(
        self, request: Request, sequence: Sequence, token: int, logprobs: StepLogprobs | None
    ) -> bool:
        """Add a token to a sequence; returns whether that finished it."""
        sequence.receive(token)
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = sequence.last_token_time
        finished = request.completions[sequence.index].append(token, logprobs)
        if sequence.num_known % self._page_size == 0:
            self._scheduler.cache_full_pages(sequence)
        if sequence.mask is not None and not finished:
            self._masks.advance(sequence, token)
        if finished:
            self._finish(request, sequence)
        return finished

    def _finish_all(self, sequences: list[Sequence]) -> int:
        """Remove those that have not finished from the scheduler; returns their number."""
        live = [s for s in sequences if s.status is not _FINISHED]
        for sequence in live:
            self._scheduler.finish(sequence)
        return len(live)

    def _finish(self, request: Request, sequence: Sequence) -> None:
        self._prefixes.pin_computed(request, sequence)
        self._scheduler.finish(sequence)
        self.stats.requests.count_finished(request, sequence)

    def stop(self, request_id: str, samples: Collection[int]) -> RequestOutput | None:
        """End samples as a stop string does; returns the request's output if it has news.

        Unknown requests and finished samples are ignored.
        """
        request = self.by_id.get(request_id)
        if request is None:
            return None
        stopped = [s for s in request.sequences if s.index in samples]
        stopped = [s for s in stopped if request.completions[s.index].stop()]
        for sequence in stopped:
            self._finish(request, sequence)
        if not stopped or not (request.wants_every_step or request.finished):
            return None
        if request.finished:
            del self.by_id[request_id]
        return request.snapshot()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request; returns its last output. An unknown id is ignored."""
        request = self.by_id.pop(request_id, None)
        if request is None:
            return None
        self._prefixes.pending.pop(request_id, None)
        self.stats.requests.finished["abort"] += self._finish_all(request.sequences)
        request.abort()
        return request.snapshot()

    def fail_masks(self) -> list[RequestOutput]:
        """End the samples whose masks have failed; returns the outputs of requests with news."""
        updated: dict[str, Request] = {}
        for sequence, error in self._masks.failures():
            if sequence.status is _FINISHED:
                continue
            request = updated[sequence.request_id] = self.by_id[sequence.request_id]
            self.fail(request, error, sequence)
        return self._news(r for r in updated.values() if r.wants_every_step or r.finished)

    def _news(self, updated: Iterable[Request]) -> list[RequestOutput]:
        """The outputs of requests; those that have finished are not under way any more."""
        outputs = [request.snapshot() for request in updated]
        for output in outputs:
            if output.finished:
                del self.by_id[output.request_id]
        return outputs

    def fail(self, request: Request, error: Exception, only: Sequence | None = None) -> None:
        """End a request, or only one of its samples, on an error."""
        ended = request.sequences if only is None else [only]
        self.stats.requests.finished["error"] += self._finish_all(ended)
        request.fail(error, [sequence.index for sequence in ended])
        if not ended[0].index:  # its pages would be the prefix
            self._prefixes.pending.pop(request.request_id, None)
