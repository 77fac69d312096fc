"""The load test: its arrivals, its figures, and a sweep against a server."""

import http.server
import inspect
import json
import math
import statistics
import threading

import pytest

from rjax.batch.compile_progress import CompileProgress
from rjax.benchmarks.serve_client import Measured, measured
from rjax.benchmarks.serve_report import row
from rjax.benchmarks.serve_workload import Workload
from rjax.benchmarks.stream_client import Streamed, stream_load_in_processes
from rjax.commands.bench import serve

from .live_server import LiveServer


@pytest.fixture
def quick_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """To few clients, on this machine."""
    defaults = inspect.unwrap(stream_load_in_processes).__kwdefaults__
    monkeypatch.setitem(defaults, "lead_seconds", 0.3)


def test_arrivals_are_poisson_and_repeatable():
    workload = Workload(model="m", seed=3)
    times = workload.arrivals(0, 5000, 10.0)
    assert times == workload.arrivals(0, 5000, 10.0) != workload.arrivals(1, 5000, 10.0)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]  # noqa: RUF007
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.1)  # exponential
    assert workload.arrivals(0, 3, math.inf) == [0.0] * 3


def test_prompts_share_beginnings_and_nothing_else():
    workload = Workload(model="m", prefixes=2, prefix_words=50, suffix_words=8)
    prompts = [b["prompt"] for b in workload.bodies(0, 40) + workload.bodies(1, 40)]
    assert len(set(prompts)) == 80
    assert len({p.split("\n")[0] for p in prompts}) == 2
    warmed = {b["prompt"].split("\n")[0] for b in workload.warm_up()}
    assert warmed == {p.split("\n")[0] for p in prompts}


def test_figures_of_a_known_run():
    done = [
        Measured(first=0.1 * i, last=0.1 * i + 0.9, end=2.0, tokens=10, prompt_tokens=8,
                 cached_tokens=4, sent=0.0, done=10.0)
        for i in range(1, 11)
    ] + [Measured(error="503: full", sent=1.0, done=1.1)]  # fmt: skip
    found = row(5.0, done, (500.0, 100.001))
    assert (found["completed"], found["failed"]) == (10, 1)
    assert found["errors"] == ["503: full"]
    assert found["ttft_ms_p50"] == pytest.approx(550)
    assert found["ttft_ms_p99"] == pytest.approx(991)
    assert found["tpot_ms_p50"] == pytest.approx(100)
    assert found["requests_per_s"] == pytest.approx(1.0)
    assert found["tokens_per_s"] == pytest.approx(10.0)
    assert found["goodput"] == pytest.approx(0.5)
    assert found["cached_share"] == 0.5
    assert row(1.0, [], (1.0, 1.0))["ttft_ms_p50"] is None


@pytest.mark.parametrize(
    ("piece", "counts"),
    [
        ({"reasoning": "a"}, True),
        ({"reasoning_content": "a"}, True),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
        ({"content": "a"}, True),
        ({"content": "", "reasoning": None, "tool_calls": []}, False),
        ({"role": "assistant"}, False),
    ],
)
def test_the_first_token_may_be_of_reasoning_or_a_call(piece, counts):
    deltas = [{"role": "assistant", "content": ""}, piece, {"content": "b"}]
    answer = Streamed(
        due=0.0,
        status=200,
        times=[1.0, 2.0, 3.0],
        events=[json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas],
        end=4.0,
        ended=True,
    )
    found = measured(answer)
    assert found.error is None
    assert found.chunks == 1 + counts
    assert (found.first, found.last) == (2.0 if counts else 3.0, 3.0)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("chat", [False, True])
def test_sweep_against_a_server(server: LiveServer, tmp_path, chat, capsys, quick_connections):
    argv = ["--url", server.url + "/v1", "--rates", "20,inf", "--requests", "6"]
    argv += [
        "--prefix-words",
        "60",
        "--suffix-words",
        "4",
        "--max-tokens",
        "6",
        "--prefixes",
        "2",
        "--warm-up",
        "2",
    ]
    argv += ["--runs-on", "a small box"]
    argv += ["--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]
    assert serve.main(argv + ["--chat"] * chat) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert [r["rate"] for r in found["rows"]] == [20.0, "inf"]
    for figures in found["rows"]:
        assert figures["completed"] == 6
        assert figures["output_tokens"] == 36
        assert figures["cached_share"] > 0.5
        assert 0 < figures["ttft_ms_p50"] <= figures["e2e_ms_p99"]
    assert found["environment"]["device"] == "a small box"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "TTFT p50" in capsys.readouterr().out


class Stranger(http.server.BaseHTTPRequestHandler):
    """Another server's way with the API: refuses what is not OpenAI's, sends remarks and nulls."""

    def do_GET(self) -> None:
        self._answer(200, "application/json", json.dumps({"data": [{"id": "other"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "ignore_eos" in body or self.headers["Authorization"] != "Bearer secret":
            self._answer(400, "application/json", json.dumps({"error": {"message": "unknown"}}))
            return
        events: list[dict] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": "x"}}], "usage": None}] * 3
        events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        events += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}]
        lines = [": a remark", *(f"data: {json.dumps(e)}" for e in events), "data: [DONE]", ""]
        self._answer(200, "text/event-stream", "\n\n".join(lines))

    def _answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.thorough
def test_sweep_against_another_server(tmp_path, capsys, quick_connections):
    (tmp_path / "key").write_text("secret\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        argv = ["--url", f"http://127.0.0.1:{other.server_port}/v1", "--chat", "--rates", "inf"]
        argv += ["--requests", "3", "--api-key-file", str(tmp_path / "key")]
        argv += ["--json", str(tmp_path / "a.json")]
        try:
            assert serve.main(argv) == 2
            assert "unknown" in capsys.readouterr().err
            assert serve.main([*argv, "--respect-eos"]) == 0
        finally:
            other.shutdown()
    found = json.loads((tmp_path / "a.json").read_text())
    [figures] = found["rows"]
    counts = figures["completed"], figures["output_tokens"], figures["prompt_tokens"]
    assert counts == (3, 9, 21)
    assert found["model"] == "other"
    assert "secret" not in json.dumps(found)


URL = ["--url", "http://127.0.0.1:1/v1"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--url"),
        (URL, "lists no model"),
        (["--url", "nowhere/v1"], "lists no model"),
        ([*URL, "--rates", "x"], "give numbers"),
        ([*URL, "--rates", "1,nan"], "above 0"),
        ([*URL, "--rates", "0"], "above 0"),
        ([*URL, "--goodput", "1"], "1000,100"),
        ([*URL, "--requests", "0"], "from 1"),
        ([*URL, "--prefixes", "-1"], "from 1"),
        ([*URL, "--api-key-file", "/nowhere"], "/nowhere"),
        ([*URL, "--rate", "1"], "did you mean --rates?"),
    ],
)
def test_wrong_input_is_one_line(argv, said, capsys):
    assert serve.main(argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("rjax bench serve: error: ")
    assert said in error


def test_a_server_without_the_route_is_one_line(server: LiveServer, capsys):
    assert serve.main(["--url", server.url]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "404" in error


@pytest.mark.thorough
def test_nothing_is_measured_while_the_server_compiles(
    server: LiveServer, monkeypatch, quick_connections
):
    engine = server.service.engine.engine
    progress = [CompileProgress(3, 3), CompileProgress(2, 3), CompileProgress(1, 3)]
    monkeypatch.setattr(engine, "compile_progress", progress.pop)
    few = ["--requests", "1", "--warm-up", "0", "--prefix-words", "8", "--suffix-words", "8"]
    assert serve.main(["--url", server.url + "/v1", *few]) == 0
    assert progress == []
