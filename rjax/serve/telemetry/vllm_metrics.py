"""The metrics of vLLM that have the same meaning here, under vLLM's own names.

Types, labels and buckets are those of vLLM 0.11 and later. Metrics of LoRA, speculative
decoding, external and multi-modal caches, and sleep are left out.
"""

import itertools
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from rjax.engine.request_stats import Histogram
from rjax.engine.stats import EngineStats

_LABELS = ["model_name", "engine"]
_ENGINE = "0"
_HISTOGRAMS = {
    "iteration_tokens_total": "Prompt and generated tokens of a step.",
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a sequence.",
    "request_time_per_output_token_seconds": "Mean between a sequence's tokens.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Prompt tokens of a sequence.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were not in the prefix cache.",
    "request_generation_tokens": "Tokens of a sequence.",
    "request_max_num_generation_tokens": "Tokens of a request's longest sequence.",
    "request_params_max_tokens": "Most tokens of a sequence, by max_tokens and the context.",
    "request_params_n": "Sequences of a request.",
}
_OLDER = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
"""Names before vLLM 0.11, which dashboards still read."""


def vllm_metrics(stats: EngineStats, model: str, cache: Mapping[str, str]) -> Iterator[Metric]:
    """The families of metrics.

    Args:
        stats: the engine's statistics.
        model: the model's name, a label.
        cache: settings of the KV pool, labels of ``cache_config_info``.
    """
    labels, requests = [model, _ENGINE], stats.requests
    for name, text, value in (
        ("num_requests_running", "Sequences running.", stats.num_running),
        (
            "num_requests_waiting",
            "Sequences waiting, preempted ones included.",
            stats.num_waiting + stats.num_swapped,
        ),
        (
            "kv_cache_usage_perc",
            "Share of the KV pool in use, 0 to 1.",
            stats.kv_bytes_used / max(stats.kv_bytes_total, 1),
        ),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens, cached ones included.", requests.prompt_tokens),
        (
            "prompt_tokens_cached",
            "Prompt tokens served from the prefix cache.",
            stats.cached_tokens,
        ),
        ("generation_tokens", "Tokens generated.", stats.output_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found.", stats.cached_tokens),
        ("num_preemptions", "Preempted sequences.", stats.preemptions),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        counter.add_metric(labels, value)
        yield counter
    finished = CounterMetricFamily(
        "vllm:request_success",
        "Sequences finished, by finish reason.",
        labels=[*_LABELS, "finished_reason"],
    )
    for reason, count in requests.finished.items():
        finished.add_metric([*labels, reason], count)
    yield finished
    for name, text in _HISTOGRAMS.items():
        found = requests.histograms[name]
        yield histogram(f"vllm:{name}", text, dict(zip(_LABELS, labels, strict=True)), found)
    for name, newer in _OLDER.items():
        found, text = requests.histograms[newer], _HISTOGRAMS[newer]
        yield histogram(f"vllm:{name}", text, dict(zip(_LABELS, labels, strict=True)), found)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV pool.", labels=["engine", *cache, "model_name"]
    )
    info.add_metric([_ENGINE, *cache.values(), model], 1)
    yield info


def histogram(name: str, text: str, labels: Mapping[str, str], found: Histogram) -> Metric:
    """A histogram with its name and help in the text format."""
    edges = [*map(str, found.edges), "+Inf"]
    below = itertools.accumulate(found.counts)
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), list(zip(edges, below, strict=True)), found.total)
    return family
