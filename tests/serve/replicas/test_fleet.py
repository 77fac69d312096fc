"""Fleets of the command on this machine's CPU: routing, failures, drain, scaling, updates."""

import asyncio
import contextlib
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from bench.serve.fleet import TINY, Fleet, Outcome, ask, body, fleet, homes, load, system_prompts
from tests.quick_compilation import process_environment

pytestmark = pytest.mark.thorough
SYSTEMS = system_prompts(8)
TWO = ("--replicas", "2", "--imbalanced-threshold", "8")
LARGE = ("--num-pages", "160")  # holds all prefixes
SECONDS = 240.0  # for anything to happen on a busy machine


CLIENTS = 120  # of a load, 15 for each system prompt


def send(server: Fleet, clients: int = CLIENTS, **more) -> list[Outcome]:
    options = {"concurrency": 16, "max_tokens": 8} | more
    return asyncio.run(load(server.url, SYSTEMS, clients=clients, **options))


def until(condition, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def warm(server: Fleet, clients: int = 24) -> None:
    """Compile the step sizes in all replicas."""
    asyncio.run(load(server.url, ["warm-up"], clients=clients, concurrency=16, max_tokens=4))


def one(server: Fleet, number: int = 0, max_tokens: int = 8) -> Outcome:
    async def asking() -> Outcome:
        async with httpx2.AsyncClient(timeout=120) as client:
            content = body(SYSTEMS[0], number, max_tokens)
            return await ask(client, server.url, content, Outcome(0))

    return asyncio.run(asking())


def overloaded(server: Fleet) -> float:
    """Requests so far whose replica had too many others."""
    metrics = httpx2.get(server.url + "/metrics", timeout=60).text
    return float(re.findall(r'reason="overloaded"\} (\S+)', metrics)[0])


def strays(outcomes: list[Outcome]) -> int:
    """Replicas of each system prompt beyond the first."""
    return sum(len(counts) - 1 for counts in homes(outcomes).values())


def at_home(outcomes: list[Outcome]) -> int:
    """Requests that the replica with most of their system prompt answered."""
    return sum(max(counts.values()) for counts in homes(outcomes).values())


@pytest.fixture(scope="module", autouse=True)
def _optimised() -> Iterator[None]:
    """The servers compute for longer than they compile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in process_environment(optimised=True).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def alone() -> list[Outcome]:
    """The same load on a server without replicas."""
    with fleet(*TINY, *LARGE) as server:
        return send(server)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "stderr"


@pytest.fixture(scope="module")
def two(log):
    """Two replicas for the tests that leave them as they were."""
    with fleet(*TINY, *TWO, "--drain-seconds", "200", log=log) as server:
        warm(server)
        yield server


def test_prompts_stay_with_their_replica_and_tokens_are_those_of_one(two, alone):
    before, overloaded_before = two.figures(), overloaded(two)
    outcomes = send(two)
    assert [(o.status, o.error, o.finished) for o in outcomes] == [(200, "", True)] * CLIENTS
    assert ["".join(o.text) for o in outcomes] == ["".join(o.text) for o in alone]
    assert strays(outcomes) <= overloaded(two) - overloaded_before
    assert at_home(outcomes) >= 84  # by chance about 72
    assert len({o.replica for o in outcomes}) == 2
    after = two.figures()

    def grown(name: str) -> float:
        return sum(after[tag][name] - before[tag][name] for tag in after)

    hits, looked = (grown(f"rjax:prefix_cache_{x}_total") for x in ("hits", "queries"))
    assert hits / looked > 0.7


def test_nothing_listens_beyond_this_machine(two):
    listed = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    ours = [
        line.split()[3] for line in listed.splitlines() if re.search(r'"(ray::|raylet|gcs_)', line)
    ]
    mine = [line.split()[3] for line in listed.splitlines() if f"pid={two.process.pid}," in line]
    assert len(ours) > 4 and mine
    for address in ours + mine:
        assert re.match(r"127\.0\.0\.1:|\[::ffff:127\.0\.0\.1\]:|\[::1\]:", address), address


def test_openai_clients_see_the_same_api(two, alone):
    with openai.OpenAI(base_url=f"{two.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        chat = body(SYSTEMS[0], 0, 8) | {"stream": False}
        extra = {"ignore_eos": chat.pop("ignore_eos")}
        answer = client.chat.completions.create(model=model.id, extra_body=extra, **chat)
        first = next(i for i, o in enumerate(alone) if o.prompt == 0)
        again = body(SYSTEMS[0], first, 8) | {"stream": True}
        again.pop("ignore_eos")
        pieces = client.chat.completions.create(model=model.id, extra_body=extra, **again)
        text = [p.choices[0].delta.content for p in pieces if p.choices[0].delta.content]
        assert "".join(text) == "".join(alone[first].text)  # tokens may share a chunk
        assert answer.usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="max_tokens is -1"):
            client.completions.create(model=model.id, prompt="a", max_tokens=-1)
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            client.completions.create(model="other", prompt="a")
        found = [
            client.responses.create(model=model.id, input=f"Number {i}", max_output_tokens=4)
            for i in range(6)
        ]
        for response in found:  # each on the replica that stored it
            assert client.responses.retrieve(response.id).id == response.id
            more = client.responses.create(
                model=model.id, input="And?", previous_response_id=response.id, max_output_tokens=4
            )
            assert more.previous_response_id == response.id
            client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(response.id)


def test_a_client_that_disconnects_ends_its_request(two):
    aborted = r'rjax:request_success_total\{replica="\w+",finished_reason="abort",.*\} (\S+)'

    def count() -> float:
        found = re.findall(aborted, httpx2.get(two.url + "/metrics", timeout=60).text)
        assert len(found) == 2
        return sum(map(float, found))

    before = count()
    begin = body(SYSTEMS[0], 1, 400)
    with httpx2.stream("POST", two.url + "/v1/chat/completions", json=begin, timeout=60) as answer:
        next(answer.iter_lines())
    until(lambda: count() == before + 1)
    until(lambda: httpx2.get(two.url + "/load", timeout=60).json()["server_load"] == 0)


def test_a_killed_replica_is_replaced_and_the_others_go_on(two):
    """kill -9 in mid-stream: errors or retries for its clients only."""
    pids = two.replica_pids()
    assert len(pids) == 2
    killed: list[float] = []

    def kill(seconds: float, done: int) -> None:
        if done >= 30 and not killed:
            os.kill(pids[0], signal.SIGKILL)
            killed.append(seconds)

    outcomes = send(two, clients=80, during=kill, max_tokens=16)
    assert killed
    failed = [o for o in outcomes if o.error]
    assert all(o.status in (200, 503) and "died" in o.error for o in failed)
    assert len(failed) <= 16  # those under way
    assert len({o.replica for o in failed if o.replica}) <= 1
    assert all(o.finished for o in outcomes if not o.error)
    assert not [o for o in failed if o.start > killed[0] + 20]
    until(lambda: len(two.replica_pids()) == 2)
    until(lambda: len(two.figures()) == 2)
    assert not any(o.error for o in send(two, clients=40))


def test_a_rolling_update_loses_nothing(two, log):
    before = set(two.figures())
    outcomes: list[Outcome] = []
    some = threading.Event()

    def watch(seconds: float, done: int) -> None:
        if done >= 5:
            some.set()

    sending = threading.Thread(
        target=lambda: outcomes.extend(send(two, 60, concurrency=4, during=watch))
    )
    sending.start()
    assert some.wait(SECONDS)
    two.process.send_signal(signal.SIGHUP)
    sending.join(SECONDS)
    until(lambda: "generation 1 runs" in log.read_text())
    assert len(outcomes) == 60
    assert not [o.error for o in outcomes if o.error]
    until(lambda: len(two.figures()) == 2 and not before & set(two.figures()))
    assert one(two).finished


def test_drain_loses_nothing(two):
    """The last test of these replicas."""
    outcomes: list[Outcome] = []
    sending = threading.Thread(
        target=lambda: outcomes.extend(send(two, clients=24, concurrency=24, max_tokens=200))
    )
    sending.start()
    until(lambda: httpx2.get(two.url + "/load", timeout=60).json()["server_load"] >= 12)
    # All 24 are accepted: the others are between the port and the engine.
    two.process.send_signal(signal.SIGTERM)
    until(lambda: httpx2.get(two.url + "/health", timeout=60).json()["status"] == "draining")
    refused = one(two)
    assert (refused.status, "shutting down" in refused.error) == (503, True)
    sending.join(SECONDS)
    assert two.process.wait(SECONDS) == 0
    assert [(o.status, o.error, len(o.text) > 0) for o in outcomes] == [(200, "", True)] * 24
    assert all(o.finished for o in outcomes)


def test_scaling_up_and_down_under_load_and_a_killed_server(alone):
    """Texts stay those of one replica; no process is left of a server that is killed."""
    options = (
        *("--replicas", "1", "--max-replicas", "2", "--min-replicas", "1"),
        *("--target-ongoing-requests", "4", "--upscale-delay-seconds", "1"),
        *("--downscale-delay-seconds", "4", "--drain-seconds", "60"),
    )
    with fleet(*TINY, *options) as server:
        outcomes, idle = [], threading.Event()

        def clients() -> None:
            while not idle.is_set():
                outcomes.append(send(server))

        sending = threading.Thread(target=clients)
        sending.start()
        until(lambda: len(server.figures()) == 2)
        most = len(server.replica_pids())
        idle.set()
        sending.join(SECONDS)
        assert most == 2
        # A light load goes on while replicas leave.
        light: list[Outcome] = []
        until(lambda: light.extend(send(server, 4, concurrency=1)) or len(server.figures()) == 1)
        assert not [o.error for o in light if o.error]
        for found in outcomes:
            assert [(o.error, o.finished, "".join(o.text)) for o in found] == [
                ("", True, "".join(o.text)) for o in alone
            ]
        pids = server.replica_pids()
        server.process.kill()
        server.process.wait(60)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert pids


def test_a_running_cluster_is_joined_and_left(tmp_path, monkeypatch):
    """Twice; the second server finds what a first one left that could not start."""
    port = free_port()
    for name, value in (
        ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),  # on 127.0.0.1 only
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
    ):
        monkeypatch.setenv(name, value)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--port", str(port), "--include-dashboard", "false", "--num-cpus", "2"),
        *("--object-store-memory", "200000000", "--disable-usage-stats"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as cluster:
        try:
            until(lambda: cluster.poll() is not None or "1 node_" in status_of(port))
            assert cluster.poll() is None, "the cluster ended"
            options = ("--replicas", "1", "--ray-address", f"127.0.0.1:{port}")
            error = error_of(*options, "--num-pages", "1", log=tmp_path / "stderr")
            assert "raise num_pages" in error
            with fleet(*TINY, *options) as server:
                assert one(server).finished
            assert server.process.returncode == 0
            assert cluster.poll() is None
        finally:
            cluster.terminate()
            cluster.wait(SECONDS)


def free_port() -> int:
    """A port that no process has, below those that the kernel gives to others meanwhile and above
    those that Ray keeps for its workers."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.Random().sample(range(20_000, first), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"of 100 ports from 20000 to {first} none is free")


def status_of(port: int) -> str:
    """What Ray says of a cluster; its nodes once they have joined it."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address=127.0.0.1:{port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout


def error_of(*options: str, log: Path) -> str:
    """The one line that a server which cannot start says."""
    with pytest.raises(RuntimeError, match="the server ended"), fleet(*TINY, *options, log=log):
        pass
    [line] = [x for x in log.read_text().splitlines() if x.startswith("rjax serve: error: ")]
    return line


def test_without_a_cluster_there_the_error_is_one_line(tmp_path):
    options = ("--replicas", "1", "--ray-address", "127.0.0.1:9")
    assert "no Ray cluster answers" in error_of(*options, log=tmp_path / "stderr")
