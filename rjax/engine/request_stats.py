"""Counters and histograms of sequences and steps, with the names, buckets and definitions of vLLM.

As in vLLM, each of the ``n`` sequences of a request counts alone, and a prompt counts when the
first token after it is read.
"""

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from rjax.batch.sequence import Sequence
from rjax.engine.request import Request
from rjax.outputs import FinishReason

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1.0, *(float(2**i) for i in range(3, 15)))
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclasses.dataclass(slots=True)
class Histogram:
    """Observations by bucket.

    Attributes:
        edges: upper edges of the buckets, each part of its bucket.
        counts: observations of each bucket, and last those above all edges.
        total: sum of the observations.
    """

    edges: tuple[float, ...]
    counts: list[int] = dataclasses.field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` observations of a value."""
        self.counts[bisect_left(self.edges, value)] += count
        self.total += value * count

    def copy(self) -> "Histogram":
        """A copy that later observations do not change."""
        return Histogram(self.edges, list(self.counts), self.total)


class RequestStats:
    """What vLLM's metrics say of requests.

    Args:
        max_model_len: most tokens of a sequence, which bounds some buckets.

    Attributes:
        prompt_tokens: prompt tokens of all sequences with a first token, cached ones included.
        finished: sequences by finish reason; the engine counts those that it cuts off.
        histograms: histograms by vLLM's name, without its prefix.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = tuple(
            float(edge)
            for exponent in range(len(str(max_model_len)))
            for edge in (10**exponent, 2 * 10**exponent, 5 * 10**exponent)
            if edge <= max_model_len
        )
        self.max_model_len = max_model_len
        self.prompt_tokens = 0
        self.finished = dict.fromkeys(_REASONS, 0)
        self.histograms = {
            name: Histogram(edges)
            for name, edges in (
                ("iteration_tokens_total", _STEP_TOKENS),
                ("time_to_first_token_seconds", _FIRST_TOKEN_SECONDS),
                ("inter_token_latency_seconds", _TOKEN_SECONDS),
                ("request_time_per_output_token_seconds", _TOKEN_SECONDS),
                ("e2e_request_latency_seconds", _REQUEST_SECONDS),
                ("request_queue_time_seconds", _REQUEST_SECONDS),
                ("request_prefill_time_seconds", _REQUEST_SECONDS),
                ("request_decode_time_seconds", _REQUEST_SECONDS),
                ("request_inference_time_seconds", _REQUEST_SECONDS),
                ("request_prompt_tokens", lengths),
                ("request_prefill_kv_computed_tokens", lengths),
                ("request_generation_tokens", lengths),
                ("request_max_num_generation_tokens", lengths),
                ("request_params_max_tokens", lengths),
                ("request_params_n", _SAMPLES),
            )
        }

    def copy(self) -> "RequestStats":
        """A copy that later counts do not change."""
        found = RequestStats(self.max_model_len)
        found.prompt_tokens = self.prompt_tokens
        found.finished = dict(self.finished)
        found.histograms = {name: item.copy() for name, item in self.histograms.items()}
        return found

    def count_tokens(self, sequences: Iterable[Sequence], now: float) -> None:
        """Count the tokens that are read of one step, and note their time.

        Args:
            sequences: the sequences that get a token.
            now: current time of ``time.monotonic``, in seconds.
        """
        first, prompts = 0, 0
        earlier: list[float] = []
        for sequence in sequences:
            last, sequence.last_token_time = sequence.last_token_time, now
            if last is not None:
                earlier.append(last)
                continue
            sequence.first_token_time = now
            first += 1
            prompts += len(sequence.prompt_token_ids)
            self.histograms["time_to_first_token_seconds"].observe(now - sequence.arrival_time)
        if earlier:
            # Usually all are of the step before, and one comparison of the list says so.
            same = earlier.count(earlier[0]) == len(earlier)
            times = {earlier[0]: len(earlier)} if same else Counter(earlier)
            for time, count in times.items():
                self.histograms["inter_token_latency_seconds"].observe(now - time, count)
        self.prompt_tokens += prompts
        if first or earlier:
            self.histograms["iteration_tokens_total"].observe(prompts + first + len(earlier))

    def count_finished(self, request: Request, sequence: Sequence) -> None:
        """Count a sequence that ended with its last token, and its request if it was the last."""
        scheduled, first = sequence.first_scheduled_time, sequence.first_token_time
        last, arrival = sequence.last_token_time, sequence.arrival_time
        reason = request.completions[sequence.index].finish_reason
        assert scheduled is not None
        assert first is not None
        assert last is not None
        assert reason is not None
        prompt, generated = len(sequence.prompt_token_ids), len(sequence.output_token_ids)
        gaps = generated - 1
        self.finished[reason] += 1
        for name, value in (
            ("e2e_request_latency_seconds", last - arrival),
            ("request_queue_time_seconds", scheduled - arrival),
            ("request_prefill_time_seconds", first - scheduled),
            ("request_decode_time_seconds", last - first),
            ("request_inference_time_seconds", last - scheduled),
            ("request_time_per_output_token_seconds", (last - first) / gaps if gaps else 0.0),
            ("request_prompt_tokens", prompt),
            ("request_prefill_kv_computed_tokens", prompt - (sequence.num_cached or 0)),
            ("request_generation_tokens", generated),
            ("request_params_max_tokens", sequence.max_tokens),
        ):
            self.histograms[name].observe(value)
        if request.finished:
            lengths = [len(sequence.output_token_ids) for sequence in request.sequences]
            self.histograms["request_params_n"].observe(len(lengths))
            self.histograms["request_max_num_generation_tokens"].observe(max(lengths))
