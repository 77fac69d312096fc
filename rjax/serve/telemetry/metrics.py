"""Prometheus metrics, with vLLM's names and the prefix ``rjax:``, and those of vLLM itself."""

import itertools
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from rjax.engine import request_stats
from rjax.engine.stats import EngineStats
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.serve.telemetry.vllm_metrics import histogram, vllm_metrics

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160),
    640,
)
_TOKENS = tuple(2**i for i in range(18))
_COUNTS = tuple(2**i for i in range(8))
_REASONS = ("stop", "length", "abort", "error")
_REJECTIONS = (
    "queued_sequences",
    "queued_tokens",
    "key_share",
    "queued_texts",
    "slow_tasks",
    "key_mask_seconds",
    "bodies_bytes",
    "connections",
    "draining",
)


class Metrics:
    """Counts requests and exports the engine's counters.

    All label values come from fixed lists, the model's name and the cache's settings; clients
    cannot add any.

    Args:
        model: the model's name.
        cache: settings of the KV pool, for ``cache_config_info``.
    """

    def __init__(self, model: str, cache: Mapping[str, object]) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._engine = _EngineFigures(model, cache)
        self.registry.register(self._engine)
        self._finished = Counter(
            "rjax:request_success",
            "Sequences finished, by finish reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in _REASONS:
            self._finished.labels(model, reason)
        self._rejections = Counter(
            "rjax:admission_rejections",
            "Requests answered with 503, by the limit that was exceeded.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in _REJECTIONS:
            self._rejections.labels(model, reason)
        self._times = {
            name: self._histogram(name, text, _SECONDS)
            for name, text in (
                ("time_to_first_token_seconds", "From arrival to the first token."),
                ("request_time_per_output_token_seconds", "Mean between a request's tokens."),
                ("e2e_request_latency_seconds", "From arrival to the last token."),
                ("request_queue_time_seconds", "From arrival to the first step."),
                ("request_prefill_time_seconds", "From the first step to the first token."),
                ("request_decode_time_seconds", "From the first token to the last."),
                ("request_inference_time_seconds", "From the first step to the last token."),
            )
        }
        self._sizes = {
            name: self._histogram(name, text, buckets)
            for name, text, buckets in (
                ("request_prompt_tokens", "Prompt tokens.", _TOKENS),
                ("request_generation_tokens", "Tokens generated.", _TOKENS),
                (
                    "request_max_num_generation_tokens",
                    "Tokens of a request's longest sample.",
                    _TOKENS,
                ),
                ("request_params_max_tokens", "max_tokens asked for.", _TOKENS),
                ("request_params_n", "n asked for.", _COUNTS),
            )
        }

    def rejected(self, reason: str) -> None:
        """Count a request that got a 503; the reason is the name of a limit, or "draining"."""
        assert reason in _REJECTIONS
        self._rejections.labels(self._model, reason).inc()

    def streamed(self, seconds: float) -> None:
        """Record the inter-token latency."""
        self._engine.gaps.observe(seconds)

    def aborted(self, sequences: int) -> None:
        """Count sequences that were aborted, by a disconnect or by another prompt's failure."""
        self._finished.labels(self._model, "abort").inc(sequences)

    def finished(self, output: RequestOutput, params: SamplingParams, generated: int) -> None:
        """Record a finished request.

        Args:
            output: its last output.
            params: its sampling parameters.
            generated: tokens of all its samples.
        """
        for completion in output.outputs:
            reason = completion.finish_reason
            if reason in _REASONS:
                self._finished.labels(self._model, reason).inc()
        self._sizes["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        self._sizes["request_generation_tokens"].observe(generated)
        self._sizes["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._sizes["request_params_max_tokens"].observe(params.max_tokens)
        times = output.metrics
        if times is None:
            return
        self._sizes["request_max_num_generation_tokens"].observe(times.num_generated_tokens)
        arrival, first = times.arrival_time, times.first_token_time
        scheduled, end = times.first_scheduled_time, times.finished_time
        for name, start, stop in (
            ("time_to_first_token_seconds", arrival, first),
            ("e2e_request_latency_seconds", arrival, end),
            ("request_queue_time_seconds", arrival, scheduled),
            ("request_prefill_time_seconds", scheduled, first),
            ("request_decode_time_seconds", first, end),
            ("request_inference_time_seconds", scheduled, end),
        ):
            if start is not None and stop is not None:
                self._times[name].observe(stop - start)
        if times.time_per_output_token is not None:
            self._times["request_time_per_output_token_seconds"].observe(
                times.time_per_output_token
            )

    def exposition(self, stats: EngineStats) -> bytes:
        """The metrics in Prometheus' text format, with the given engine statistics."""
        self._engine.stats = stats
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"rjax:{name}", text, ["model_name"], registry=self.registry, buckets=tuple(buckets)
        ).labels(self._model)


class _EngineFigures(Collector):
    """Exports the engine's statistics at the time of a scrape."""

    def __init__(self, model: str, cache: Mapping[str, object]) -> None:
        self._model = model
        self._cache = {name: str(value) for name, value in cache.items()}
        self.stats: EngineStats | None = None
        self.gaps = request_stats.Histogram(tuple(map(float, _SECONDS)))
        """Inter-token latencies; the class of prometheus_client takes longer for each token."""

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        if stats is None:
            return
        saved = max(0, stats.kv_bytes_without_sharing - stats.kv_bytes_used)
        for name, text, value in (
            ("num_requests_running", "Sequences running.", stats.num_running),
            ("num_requests_waiting", "Sequences waiting.", stats.num_waiting),
            ("num_requests_swapped", "Sequences in host memory.", stats.num_swapped),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool in use, 0 to 1.",
                stats.kv_bytes_used / max(stats.kv_bytes_total, 1),
            ),
            ("kv_bytes_used", "Bytes of KV in use.", stats.kv_bytes_used),
            ("kv_bytes_total", "Bytes of KV that the pool has room for.", stats.kv_bytes_total),
            (
                "kv_bytes_cached",
                "Bytes of KV that no sequence uses and a later prompt can.",
                stats.kv_bytes_cached,
            ),
            (
                "kv_bytes_pinned",
                "Bytes of KV of pinned prefixes, part of kv_bytes_used.",
                stats.kv_bytes_pinned,
            ),
            ("kv_bytes_saved", "Bytes of KV that prefix sharing saves now.", saved),
        ):
            gauge = GaugeMetricFamily(f"rjax:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Preempted sequences.", stats.preemptions),
            ("num_swaps", "Preempted sequences whose pages were swapped out.", stats.swaps),
            ("prompt_tokens", "Prompt tokens admitted.", stats.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens served from the prefix cache.",
                stats.cached_tokens,
            ),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found.", stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.output_tokens),
            ("engine_steps", "Steps dispatched.", stats.steps),
            (
                "kv_tokens_read",
                "Tokens of KV that attention read, per layer.",
                stats.kv_tokens_read,
            ),
            (
                "kv_token_reads_saved",
                "Tokens of KV whose repeated reads relay attention saved, per layer.",
                max(0, stats.kv_tokens_unshared - stats.kv_tokens_read),
            ),
            (
                "shared_groups",
                "Groups of sequences that shared KV reads, over all steps.",
                stats.shared_groups,
            ),
            (
                "kv_event_batches",
                "Batches of KV events published (--kv-events-config).",
                stats.kv_event_batches,
            ),
            (
                "kv_event_batches_dropped",
                "Batches of KV events dropped, because the publisher was too slow.",
                stats.kv_event_batches_dropped,
            ),
        ):
            counter = CounterMetricFamily(f"rjax:{name}", text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._steps(stats)
        yield histogram(
            "rjax:inter_token_latency_seconds",
            "Between two pieces of a streamed sequence.",
            {"model_name": self._model},
            self.gaps,
        )
        info = GaugeMetricFamily(
            "rjax:cache_config_info", "The KV pool.", labels=["model_name", *self._cache]
        )
        info.add_metric([self._model, *self._cache.values()], 1)
        yield info
        yield from vllm_metrics(stats, self._model, self._cache)

    def _steps(self, stats: EngineStats) -> Metric:
        """Histogram of step sizes with buckets at powers of two."""
        counts = [stats.steps_by_size.get(i, 0) for i in range(len(_TOKENS))]
        edges = [*(f"{float(edge)}" for edge in _TOKENS), "+Inf"]
        below = [*itertools.accumulate(counts), stats.steps]
        found = HistogramMetricFamily(
            "rjax:iteration_tokens_total", "Tokens computed in a step.", labels=["model_name"]
        )
        found.add_metric([self._model], list(zip(edges, below, strict=True)), stats.step_tokens)
        return found
