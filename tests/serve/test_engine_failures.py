"""What a request may not do to the engine, what a start refuses, and how a dead engine ends."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from rjax.commands.serve import command
from rjax.engine import llm_engine
from rjax.engine.prefix_file import PrefixOrigin, load_prefix_file
from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import LIMITS
from rjax.serve.http import server as server_module
from rjax.serve.loading import served_engine, service_builder, service_loader

from .hostile import SHORT, Stream, ask, get, post, until
from .live_server import LiveServer, live_server, make_engine, write_model

ON_A_THREAD = ("--disable-frontend-multiprocessing", "--warmup", "off")


def model_with(folder: Path, generation: dict[str, Any]) -> Path:
    write_model(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_most_end_ids_and_most_stop_ids_are_served(tmp_path):
    """The tokenizer names one end of its own."""
    folder = model_with(tmp_path, {"eos_token_id": [*range(40, 39 + LIMITS.eos_token_ids)]})
    stops = [*range(100, 100 + LIMITS.stop_token_ids)]
    with live_server(make_engine(folder)) as server:
        body = {**SHORT, "stop_token_ids": stops, "min_tokens": 2}
        assert ask(server, "POST", "/v1/completions", body).status == 200
        assert get(server, "/health").json == {"status": "ready"}


@pytest.mark.parametrize(("generation", "message"), [
    ({"eos_token_id": [*range(40, 61)]}, "22 end-of-sequence ids; at most 16"),
    ({"temperature": "warm"}, "temperature is 'warm'"),
    ({"temperature": [1]}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_p": {}}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"max_new_tokens": "many"}, "max_tokens"),
    ({"max_new_tokens": -1}, "max_tokens"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"eos_token_id": "2"}, "eos_token_id"),
])  # fmt: skip
def test_a_bad_generation_config_is_refused_at_the_start(tmp_path, generation, message):
    folder = model_with(tmp_path, generation)
    with pytest.raises(InvalidConfigError, match=message) as found:
        make_engine(folder)
    assert "generation_config.json" in str(found.value)


@pytest.mark.parametrize(("tensors", "message"), [
    ({"tokens": np.zeros(3, ml_dtypes.bfloat16)}, "tokens of dtype BF16, not I32"),
    ({"tokens": np.zeros(3, ml_dtypes.float8_e4m3fn)}, "tokens of dtype F8_E4M3, not I32"),
    ({"tokens": np.zeros(3, np.float32)}, "tokens of dtype F32, not I32"),
    ({"tokens": np.zeros(3, np.int64)}, "tokens of dtype I64, not I32"),
    ({"kv": np.zeros((1, 8), ml_dtypes.bfloat16)}, "kv of dtype BF16, not U8"),
    ({"kv": np.zeros((1, 8), np.int8)}, "kv of dtype I8, not U8"),
    ({"kv": np.zeros((1, 7), np.uint8)}, "damaged"),
    ({"kv": np.zeros((), np.uint8)}, "damaged"),
    ({"tokens": np.zeros((3, 1), np.int32)}, "damaged"),
])  # fmt: skip
def test_a_prefix_file_of_other_types_is_refused(tmp_path, tensors, message):
    path = tmp_path / "prefix.safetensors"
    origin = PrefixOrigin("m", "float32", 8)
    good = {"tokens": np.zeros(3, np.int32), "kv": np.zeros((1, 8), np.uint8)}
    metadata = {"format": "rjax-prefix-2", "model": "m", "dtype": "float32", "page_size": "8"}
    save_file(good, str(path), metadata)
    assert load_prefix_file(path, origin, np.dtype(np.float32)).token_ids == [0, 0, 0]
    save_file(good | tensors, str(path), metadata)
    with pytest.raises(InvalidConfigError, match=message):
        load_prefix_file(path, origin, np.dtype(np.float32))


def test_a_request_that_fails_in_a_step_fails_alone(server: LiveServer, monkeypatch):
    plain = llm_engine.slot_row

    def refuses(params, **more):
        if params.seed == 666:
            raise InvalidRequestError("too many ids end this sequence at 0x7f00")
        return plain(params, **more)

    server.wait_idle()
    monkeypatch.setattr(llm_engine, "slot_row", refuses)
    other = Stream(server, {**SHORT, "max_tokens": 100, "ignore_eos": True})
    assert other.begun.wait(60)
    for n in (1, 3):
        body = {**SHORT, "temperature": 1, "seed": 1, "n": n}
        assert ask(server, "POST", "/v1/completions", body).status == 200  # may compile
        found = post(server, {**SHORT, "temperature": 1, "seed": 666, "n": n})
        assert found.status == 500
        assert b"0x" not in found.body
    other.join(60)
    assert other.whole
    assert get(server, "/health").json == {"status": "ready"}
    server.wait_idle()
    assert server.used_bytes() == 0


@pytest.mark.thorough
def test_a_dead_engine_ends_the_process(folder, monkeypatch, capsys):
    """Requests under way and later ones get a 503, and then the port closes."""
    engine, found = make_engine(folder), []
    monkeypatch.setattr(server_module, "_DEAD_SECONDS", 1e9)
    monkeypatch.setattr(served_engine, "build_engine", lambda config: engine)
    monkeypatch.setattr(service_loader.gc, "freeze", lambda: None)
    service: list[Any] = []
    plain = service_builder.make_service
    monkeypatch.setattr(
        service_builder,
        "make_service",
        lambda *a, **k: service.append(plain(*a, **k)) or service[0],
    )
    thread = threading.Thread(
        target=lambda: found.append(command.main([*ON_A_THREAD, "--port", "0"])), daemon=True
    )
    thread.start()
    url = ""

    def listening() -> bool:
        nonlocal url
        line = capsys.readouterr().out
        url = url or line.partition(" on ")[2].strip().removesuffix("/v1")
        return bool(url)

    until(listening, 60)
    live: Any = LiveServer(url, service[0], None, None)  # type: ignore[arg-type]
    assert ask(live, "POST", "/v1/completions", SHORT).status == 200

    def broken():
        time.sleep(0.3)
        raise RuntimeError("device lost at 0x7f00")

    monkeypatch.setattr(engine, "step", broken)
    assert ask(live, "POST", "/v1/completions", SHORT).status == 503
    health = ask(live, "GET", "/health")
    assert (health.status, health.json) == (503, {"status": "dead"})
    assert ask(live, "POST", "/v1/completions", SHORT).json["error"]["code"] == "engine_dead"
    monkeypatch.setattr(server_module, "_DEAD_SECONDS", 0.0)
    thread.join(60)
    assert found == [1]
    assert "the engine stopped" in capsys.readouterr().err
    with pytest.raises(OSError):  # noqa: PT011 - whichever way it is refused
        ask(live, "GET", "/health")
