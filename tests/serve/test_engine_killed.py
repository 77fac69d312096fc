"""kill -9 of the server's engine process, and of the server."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from .hostile import until
from .test_sigterm import BODY, SOON, children, is_alive, process

__all__ = ["process"]  # a fixture


def engine_of(server: int) -> int:
    """Process id of the engine."""
    (found,) = [
        pid
        for pid in children(server)
        if b"rjax.engine_channel.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


@pytest.mark.thorough
def test_a_killed_engine_ends_streams_and_server(process):
    started, url = process
    events: list[str] = []
    begun = threading.Event()

    def client() -> None:
        body = BODY | {"max_tokens": 490}
        with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    begun.set()

    thread = threading.Thread(target=client)
    thread.start()
    assert begun.wait(120)
    os.kill(engine_of(started.pid), signal.SIGKILL)
    killed = time.monotonic()
    thread.join(SOON)
    assert not thread.is_alive()
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    with contextlib.suppress(httpx2.TransportError):  # it has ended already, on a busy machine
        health = httpx2.get(url + "/health", timeout=SOON)
        assert (health.status_code, health.json()) == (503, {"status": "dead"})
        late = httpx2.post(url + "/v1/completions", json=BODY | {"stream": False}, timeout=SOON)
        assert late.status_code == 503
    assert started.wait(SOON) == 1
    assert time.monotonic() - killed < SOON


@pytest.mark.slow  # tests/engine_channel kills front ends of an engine that starts in less
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_the_server(process, sent):
    started, url = process
    assert httpx2.get(url + "/health", timeout=SOON).status_code == 200
    engine = engine_of(started.pid)
    os.kill(started.pid, sent)
    started.wait(60)
    until(lambda: not is_alive(engine), SOON)


_FRONT_END = """\
from jax._src import xla_bridge
from rjax.config import EngineConfig
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.loading.service_loader import ServiceLoader

config = EngineConfig.from_options({"max_model_len": 128, "max_num_seqs": 2, "num_pages": 8,
                                    "warmup": "off"})
loader = ServiceLoader(config, {}, ServeConfig(model="tiny"), engine_process=True)
service, app = loader.load()
print(loader.summary({}))
assert not xla_bridge._backends, xla_bridge._backends
service.close()
service.engine.channel.end()
assert service.engine.channel.join(60)
"""


@pytest.mark.slow
def test_the_front_end_uses_no_device():
    """Its memory is the engine's."""
    done = subprocess.run(
        [sys.executable, "-c", _FRONT_END], timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
