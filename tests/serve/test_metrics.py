"""What /metrics tells: vLLM's names, and figures that move with what happens."""

import socket
import time

import httpx2

from rjax.serve.limits import ServeLimits

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
    lines = httpx2.get(server.url + "/metrics").text.splitlines()
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
    assert grown["inter_token_latency_seconds_count"] >= 5
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
            end = time.monotonic() + 25
            while refused.status_code == 200 and time.monotonic() < end:
                refused = post(small, **BODY)  # the slow one has not begun yet
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert httpx2.get(small.url + "/health").json() == {"status": "ready"}
        small.wait_idle()
        found = scrape(small)
        for reason in ("queued_sequences", "queued_tokens", "connections"):
            assert found[f'admission_rejections_total{{reason="{reason}"}}'] == 1, reason
        assert found['admission_rejections_total{reason="draining"}'] == 0
