"""What /metrics tells: vLLM's names, and figures that move with what happens."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rjax.engine.request_stats import Histogram
from rjax.serve.config.limits import ServeLimits
from rjax.worker.programs.cache import CompiledPrograms

from .hostile import until
from .live_server import LiveServer, live_server, make_engine

# vLLM's core set, for which dashboards exist; a histogram has _count, a counter _total.
NAMES = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
    *("request_success_total", "admission_rejections_total", "cache_config_info"),
    *("iteration_tokens_total_count", "inter_token_latency_seconds_count"),
    *("time_to_first_token_seconds_count", "request_time_per_output_token_seconds_count"),
    *("e2e_request_latency_seconds_count", "request_queue_time_seconds_count"),
    *("request_prefill_time_seconds_count", "request_decode_time_seconds_count"),
    *("request_inference_time_seconds_count", "request_prompt_tokens_count"),
    *("request_generation_tokens_count", "request_max_num_generation_tokens_count"),
    *("request_params_n_count", "request_params_max_tokens_count", "num_requests_swapped"),
]
PER_REQUEST = [
    name
    for name in NAMES
    if name.endswith("_count") and not name.startswith(("iteration", "inter_token"))
]
BODY = {"prompt": "a", "max_tokens": 4, "temperature": 1, "ignore_eos": True}


def scrape(server: LiveServer) -> dict[str, float]:
    """Value by name and labels, the model's name left out."""
    lines = httpx2.get(server.url + "/metrics", timeout=60).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    found = {}
    for name, value in pairs:
        stem, _, labels = name.removesuffix("}").partition("{")
        kept = [label for label in labels.split(",") if label and "model_name" not in label]
        key = stem.removeprefix("rjax:") + ("{" + ",".join(kept) + "}" if kept else "")
        found[key] = float(value)
    return found


def post(server: LiveServer, path: str = "/v1/completions", **body) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=60)


def test_the_names_are_those_of_vllm(server: LiveServer):
    post(server, **BODY)
    stems = {name.partition("{")[0] for name in scrape(server)}
    assert not set(NAMES) - stems


def test_figures_move_with_what_happens(server: LiveServer):
    before = scrape(server)
    steps = server.call(lambda engine: engine.stats()).steps
    system = {"role": "system", "content": "All of them share this. " * 12}
    messages = [system, {"role": "user", "content": "Who lives in Peru?"}]
    args = {"messages": messages, "max_tokens": 6, "n": 3, "seed": 1, "temperature": 1}
    assert post(server, "/v1/chat/completions", **args).status_code == 200
    streamed = post(server, "/v1/chat/completions", stream=True, **args)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    steps = server.call(lambda engine: engine.stats()).steps - steps
    grown = {name: value - before.get(name, 0) for name, value in scrape(server).items()}
    assert grown["generation_tokens_total"] == 36
    assert grown["kv_token_reads_saved_total"] > 0
    assert grown["prefix_cache_hits_total"] > 0
    assert {name: grown[name] for name in PER_REQUEST} == dict.fromkeys(PER_REQUEST, 2)
    assert grown["request_generation_tokens_sum"] == 36
    assert grown["request_max_num_generation_tokens_sum"] == 12
    assert grown['request_max_num_generation_tokens_bucket{le="8.0"}'] == 2
    assert grown["inter_token_latency_seconds_count"] > 0  # fewer where tokens come together
    assert grown['request_success_total{finished_reason="length"}'] == 6


def test_steps_are_counted_by_size(server: LiveServer):
    before = scrape(server)
    steps = server.call(lambda engine: engine.stats()).steps
    assert post(server, **BODY).status_code == 200
    server.wait_idle()
    steps = server.call(lambda engine: engine.stats()).steps - steps
    grown = {name: value - before.get(name, 0) for name, value in scrape(server).items()}
    sizes = {
        name: value for name, value in grown.items() if name.startswith("iteration_tokens_total_b")
    }
    assert list(sizes.values()) == sorted(sizes.values())
    assert sizes['iteration_tokens_total_bucket{le="+Inf"}'] == steps
    assert sizes['iteration_tokens_total_bucket{le="1.0"}'] >= 3  # one token each
    assert grown["iteration_tokens_total_count"] == steps
    assert grown["iteration_tokens_total_sum"] >= 4


def test_the_cache_is_described(server: LiveServer):
    [info] = [name for name in scrape(server) if name.startswith("cache_config_info")]
    assert 'block_size="8"' in info
    assert 'num_gpu_blocks="1024"' in info
    assert 'enable_prefix_caching="True"' in info


def test_rejections_name_their_limit(folder):
    limits = ServeLimits(queued_sequences=3, queued_tokens=40, connections=1)
    with live_server(make_engine(folder), limits=limits) as small:
        assert post(small, **BODY, n=4).status_code == 503
        assert post(small, **{**BODY, "prompt": [5] * 41}).status_code == 503
        host, port = small.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            refused = post(small, **BODY)
            end = time.monotonic() + 60
            while refused.status_code == 200 and time.monotonic() < end:
                refused = post(small, **BODY)  # the slow one has not begun yet
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert httpx2.get(small.url + "/health", timeout=60).json() == {"status": "ready"}
        small.wait_idle()
        found = scrape(small)
        for reason in ("queued_sequences", "queued_tokens", "connections"):
            assert found[f'admission_rejections_total{{reason="{reason}"}}'] == 1, reason
        assert found['admission_rejections_total{reason="draining"}'] == 0


@pytest.mark.thorough
def test_probes_and_figures_while_a_step_compiles(folder, monkeypatch):
    get, entered, compiled = CompiledPrograms.get, threading.Event(), threading.Event()

    def slow(programs: CompiledPrograms, key):
        entered.set()
        assert compiled.wait(60)
        return get(programs, key)

    limits = ServeLimits(heartbeat_seconds=2)
    with live_server(make_engine(folder), limits=limits) as small, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(CompiledPrograms, "get", slow)
        first = threads.submit(post, small, **BODY)
        assert entered.wait(60)
        time.sleep(2.5)
        try:
            health = httpx2.get(small.url + "/health", timeout=60)
            assert health.status_code == 200
            assert health.json() == {"status": "ready", "compiled": 0, "of": 1}
            assert scrape(small)["num_requests_waiting"] == 1
            second = threads.submit(post, small, **BODY)
            until(lambda: small.service.num_live == 2)
        finally:
            compiled.set()
        assert {first.result().status_code, second.result().status_code} == {200}
        assert scrape(small)["num_requests_waiting"] == 0


# The series that the queries of vLLM's dashboards name (examples/observability, 0.8 to 0.13).
DASHBOARDS = [
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total"),
    *("vllm:generation_tokens_total", "vllm:time_per_output_token_seconds_bucket"),
    *("vllm:time_per_output_token_seconds_sum", "vllm:time_per_output_token_seconds_count"),
    *("vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum"),
    *("vllm:inter_token_latency_seconds_count", "vllm:num_requests_running"),
    *("vllm:num_requests_waiting", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_count"),
    *("vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens_bucket"),
    *("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count"),
    *("vllm:request_generation_tokens_bucket", "vllm:request_generation_tokens_sum"),
    *("vllm:request_generation_tokens_count", "vllm:request_success_total"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:iteration_tokens_total_bucket", "vllm:request_params_max_tokens_bucket"),
    *("vllm:request_time_per_output_token_seconds_bucket", "vllm:num_preemptions_total"),
]


@pytest.fixture
def unused(folder):
    with live_server(make_engine(folder)) as found:
        yield found


def vllm_values(server: LiveServer) -> dict[str, float]:
    """Value by name, labels of vLLM checked and left out, but for that of the finish reason."""
    text = httpx2.get(server.url + "/metrics", timeout=60).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "tiny"
                assert labels.pop("engine") == "0"
                kept = [labels[name] for name in ("finished_reason", "le") if name in labels]
                key = ":".join([sample.name.removeprefix("vllm:"), *kept])
                assert key not in found
                found[key] = sample.value
    return found


def test_every_query_of_vllms_dashboards_has_a_series(server: LiveServer):
    post(server, **BODY)
    text = httpx2.get(server.url + "/metrics", timeout=60).text
    families = text_string_to_metric_families(text)
    found = {s.name: {"model_name", "engine"} <= set(s.labels) for f in families for s in f.samples}
    assert {name: found.get(name) for name in DASHBOARDS} == dict.fromkeys(DASHBOARDS, True)


def test_vllms_metrics_count_as_vllm_does(unused: LiveServer):
    """The expectations of vLLM's own test of its counts: requests one after another."""
    requests, prompt, generated = 5, 21, 6
    tokens = list(range(40, 40 + prompt))
    body = {"prompt": tokens, "max_tokens": generated, "temperature": 0, "ignore_eos": True}
    for _ in range(requests):
        assert post(unused, **body).status_code == 200
    unused.wait_idle()
    found = vllm_values(unused)
    expected = {
        "time_to_first_token_seconds_count": requests,
        "inter_token_latency_seconds_count": requests * (generated - 1),
        "time_per_output_token_seconds_count": requests * (generated - 1),
        "request_time_per_output_token_seconds_count": requests,
        "e2e_request_latency_seconds_count": requests,
        "request_queue_time_seconds_count": requests,
        "request_inference_time_seconds_count": requests,
        "request_prefill_time_seconds_count": requests,
        "request_decode_time_seconds_count": requests,
        "request_prompt_tokens_sum": requests * prompt,
        "request_prompt_tokens_count": requests,
        "request_generation_tokens_sum": requests * generated,
        "request_generation_tokens_count": requests,
        "request_params_n_sum": requests,
        "request_params_n_count": requests,
        "request_params_max_tokens_sum": requests * generated,
        "request_params_max_tokens_count": requests,
        "request_max_num_generation_tokens_sum": requests * generated,
        "iteration_tokens_total_sum": requests * (prompt + generated),
        "iteration_tokens_total_count": requests * generated,
        "prompt_tokens_total": requests * prompt,
        "generation_tokens_total": requests * generated,
        "request_success_total:length": requests,
        "request_success_total:stop": 0,
        "prefix_cache_queries_total": requests * prompt,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_preemptions_total": 0,
        "cache_config_info": 1,
    }
    assert {name: found[name] for name in expected} == expected
    hits = found["prefix_cache_hits_total"]
    assert hits >= (requests - 1) * 16  # whole pages of 8 tokens, at least
    assert found["prompt_tokens_cached_total"] == hits
    assert found["request_prefill_kv_computed_tokens_sum"] == requests * prompt - hits
    assert found["request_prompt_tokens_bucket:20.0"] == 0
    assert found["request_prompt_tokens_bucket:50.0"] == requests
    assert "request_prompt_tokens_bucket:500.0" in found  # 1, 2, 5, ... up to max_model_len, 512
    assert "request_prompt_tokens_bucket:1000.0" not in found
    waited = found["request_queue_time_seconds_sum"] + found["request_inference_time_seconds_sum"]
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(waited)
    first = found["request_queue_time_seconds_sum"] + found["request_prefill_time_seconds_sum"]
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(first)
    gaps = found["inter_token_latency_seconds_sum"]
    assert found["request_decode_time_seconds_sum"] == pytest.approx(gaps)


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
def test_samples_count_as_requests_in_vllms_metrics(unused: LiveServer, stream):
    body = {"prompt": [9] * 10, "max_tokens": 5, "temperature": 1, "ignore_eos": True, "n": 3}
    assert post(unused, stream=stream, **body).status_code == 200
    unused.wait_idle()
    found = vllm_values(unused)
    assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"] == 30
    assert found["request_success_total:length"] == 3
    assert found["inter_token_latency_seconds_count"] == 12
    assert (found["request_params_n_count"], found["request_params_n_sum"]) == (1, 3)
    assert found["request_max_num_generation_tokens_count"] == 1
    assert found["e2e_request_latency_seconds_count"] == 3


def test_aborted_requests_in_vllms_metrics(unused: LiveServer, monkeypatch):
    engine = unused.service.engine.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    with httpx2.stream(
        "POST",
        unused.url + "/v1/completions",
        json={"prompt": [9] * 10, "max_tokens": 400, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()  # closes the connection when it is dropped
        next(lines)
        assert vllm_values(unused)["num_requests_running"] == 1
    unused.wait_idle()
    found = vllm_values(unused)
    assert found["num_requests_running"] == 0
    assert found["request_success_total:abort"] == 1
    assert found["e2e_request_latency_seconds_count"] == 0


def test_an_edge_belongs_to_its_bucket():
    found = Histogram((1.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 6.0):
        found.observe(value, 2)
    assert (found.counts, found.total) == ([4, 4, 2], 28.0)
