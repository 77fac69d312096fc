"""The routes that trainers call: who may, what they change, and the forms of their answers."""

import os
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.clients.tiny_checkpoint import random_weights

from .live_server import LiveServer, live_server, make_engine
from .weight_sender import WeightSender

PORT = 21_000 + os.getpid() % 40_000
KEYS, OPERATOR = ["a-key-of-a-client-1"], "a-key-of-an-operator"
PROMPT = list(range(20, 60))

type Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def trained(folder) -> Iterator[LiveServer]:
    """A server whose weights its operator changes."""
    engine = make_engine(folder, logprobs_mode="processed_logprobs")
    with live_server(
        engine, keys=KEYS, operator_keys=(OPERATOR,), enable_weight_updates=True
    ) as found:
        yield found


def call(server: LiveServer, path: str, body: Any = None, method: str = "POST") -> httpx2.Response:
    """A request of an operator, who has the key in the URL as TRL's clients do."""
    url = server.url.replace("://", f"://trl:{OPERATOR}@") + path
    return httpx2.request(method, url, json=body, timeout=60)


def ask(server: LiveServer, **fields: Any) -> tuple[list[int], list[float], int]:
    """Tokens and logprobs of a greedy answer, and the number of cached prompt tokens."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "logprobs": 0, **fields}
    found = call(server, "/v1/completions", {**body, "return_token_ids": True}).json()
    [choice] = found["choices"]
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached


def announced(weights: Weights) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtype_names": [array.dtype.name for array in weights.values()],
        "shapes": [list(array.shape) for array in weights.values()],
    }


def connect(server: LiveServer, sender: WeightSender) -> None:
    body = {"init_info": {"master_address": "127.0.0.1", "master_port": PORT, "world_size": 2}}
    found: list[httpx2.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(call(server, "/init_weight_transfer_engine", body))
    )
    thread.start()
    sender.accept()
    thread.join()
    assert found[0].status_code == 200, found[0].text


def update(server: LiveServer, sender: WeightSender, weights: Weights) -> httpx2.Response:
    """An update as TRL does it: the request and the tensors go at the same time."""
    assert call(server, "/start_weight_update", {}).status_code == 200
    found: list[httpx2.Response] = []
    body = {"update_info": announced(weights)}
    thread = threading.Thread(target=lambda: found.append(call(server, "/update_weights", body)))
    thread.start()
    arrays = list(weights.values())
    for bucket in (arrays[:5], arrays[5:]):
        if bucket:
            sender.send(bucket)
            assert sender.answer() == ""
    thread.join()
    assert found[0].status_code == 200, found[0].text
    return call(server, "/finish_weight_update")


def test_new_weights_are_used_and_kv_of_old_ones_is_not(trained, folder):
    one, other = random_weights(folder, 1), random_weights(folder, 2)
    with WeightSender(PORT) as sender:
        connect(trained, sender)
        ask(trained)
        answers = []
        for number, weights in enumerate((one, other, one)):
            before = ask(trained)
            assert before[2] > 0
            found = update(trained, sender, weights)
            assert found.status_code == 200, found.text
            assert found.json()["weights_version"] == trained.call(lambda e: e.weights_version)
            tokens, logprobs, cached = ask(trained)
            assert cached == 0, number
            assert (tokens, logprobs) != before[:2]
            answers.append((tokens, logprobs))
        assert answers[0] == answers[2] != answers[1]


def test_refused_weights_change_nothing(trained, folder):
    weights = random_weights(folder, 3)
    ask(trained)
    before, version = ask(trained), trained.call(lambda engine: engine.weights_version)
    name = "model.norm.weight"
    for wrong in (
        {**weights, name: weights[name][:-1]},
        {**weights, name: weights[name] * np.float32(np.nan)},
        {**weights, "model.norm.scale": weights[name]},
        dict(list(weights.items())[:4]),
    ):
        with WeightSender(PORT) as sender:
            connect(trained, sender)
            found = update(trained, sender, wrong)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["code"] == "invalid_weights"
        assert ask(trained) == before
    assert trained.call(lambda engine: engine.weights_version) == version


def test_a_trainer_that_is_killed_changes_nothing(trained, folder):
    ask(trained)
    before = ask(trained)
    weights = random_weights(folder, 4)
    with WeightSender(PORT) as sender:
        connect(trained, sender)
        assert call(trained, "/start_weight_update").status_code == 200
        sender.send(list(weights.values())[:3])
        threading.Timer(0.2, sender.close).start()
        found = call(trained, "/update_weights", {"update_info": announced(weights)})
    assert found.status_code == 400
    assert "closed the connection" in found.json()["error"]["message"]
    assert call(trained, "/finish_weight_update").status_code == 409
    assert ask(trained) == before


def test_a_trainer_on_another_machine_is_refused(trained):
    body = {"init_info": {"master_address": "192.0.2.1", "master_port": PORT}}
    found = call(trained, "/init_weight_transfer_engine", body)
    assert found.status_code == 400
    assert "not of this machine" in found.json()["error"]["message"]


def test_pickled_weights_are_refused(trained):
    body = {"update_info": {**announced({}), "ipc_handles_pickled": "gASV"}}
    found = call(trained, "/update_weights", body)
    assert found.status_code == 400
    assert "nothing is unpickled" in found.json()["error"]["message"]


def test_the_routes_of_an_older_trl(trained, folder):
    assert call(trained, "/health/", method="GET").json() == {"status": "ready"}
    assert call(trained, "/get_world_size/", method="GET").json() == {"world_size": 1}
    weights = random_weights(folder, 5)
    ask(trained)
    before = ask(trained)

    def send(sender: WeightSender, count: int) -> None:
        init = {"host": "0.0.0.0", "port": PORT, "world_size": 2, "client_device_uuid": "42"}
        assert call(trained, "/init_communicator/", init).status_code == 200
        sender.accept()
        for name, array in list(weights.items())[:count]:
            body = {"name": name, "dtype": f"torch.{array.dtype}", "shape": list(array.shape)}
            assert call(trained, "/update_named_param/", body).status_code == 200
            sender.send([array])
            assert sender.answer() == ""

    with WeightSender(PORT) as sender:
        send(sender, 3)
        body = {"name": "lm_head.weight", "dtype": "torch.float32", "shape": [3]}
        assert call(trained, "/update_named_param/", body).status_code == 200
    # The trainer was killed: what it sent is dropped.
    assert call(trained, "/reset_prefix_cache/").status_code == 200
    after = ask(trained)
    assert after[0] == before[0]
    assert after[1] == pytest.approx(before[1], abs=1e-4)  # this prompt's KV was not cached
    found = call(trained, "/update_named_param/", body)
    assert found.status_code == 409 and "no trainer" in found.text

    with WeightSender(PORT) as sender:
        send(sender, len(weights))
        text = "Who lives in Peru?"
        fields = {"n": 2, "temperature": 1.0, "max_tokens": 4, "generation_kwargs": {"seed": 3}}
        body = {"prompts": [text, "How old?"], **fields}
        found = call(trained, "/generate/", body).json()
        assert call(trained, "/close_communicator/").status_code == 200
    assert [len(ids) for ids in found["completion_ids"]] == [4] * 4
    assert [len(values) for values in found["logprobs"]] == [4] * 4
    assert found["prompt_ids"][0] == call(trained, "/tokenize", {"prompt": text}).json()["tokens"]
    assert ask(trained)[1] != pytest.approx(before[1], abs=1e-2)


def test_token_ids_are_completed_by_token_ids(trained):
    params = {"temperature": 0.8, "seed": 7, "n": 2, "max_tokens": 4, "logprobs": 1}
    body = {
        "request_id": "mine",
        "token_ids": PROMPT,
        "features": None,
        "sampling_params": {**params, "output_kind": 2, "structured_outputs": None},
    }
    found = call(trained, "/inference/v1/generate", body).json()
    wanted = call(
        trained,
        "/v1/completions",
        {**params, "prompt": PROMPT, "return_token_ids": True, "return_tokens_as_token_ids": True},
    ).json()
    assert found["request_id"] == "mine"
    for ours, theirs in zip(found["choices"], wanted["choices"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["finish_reason"] == "length"
        content = ours["logprobs"]["content"]
        assert [c["token"] for c in content] == theirs["logprobs"]["tokens"]
        assert [c["logprob"] for c in content] == theirs["logprobs"]["token_logprobs"]
        assert all(len(c["top_logprobs"]) == 1 for c in content)
    refused = call(trained, "/inference/v1/generate", {**body, "features": {"image": []}})
    assert refused.status_code == 400 and "text only" in refused.text


def test_a_trainer_reads_the_settings(trained):
    found = call(trained, "/server_info?config_format=json", method="GET").json()["vllm_config"]
    assert found["weight_transfer_config"] == {"backend": "shared_memory"}
    assert found["model_config"]["dtype"] == "torch.float32"
    assert found["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert call(trained, "/get_world_size", method="GET").json() == {"world_size": 1}
    assert call(trained, "/reset_prefix_cache").json() == {"success": True}


def test_only_operators_reach_the_routes(trained, server):
    for path in ("/start_weight_update", "/finish_weight_update", "/reset_prefix_cache"):
        client = {"Authorization": f"Bearer {KEYS[0]}"}
        assert httpx2.post(trained.url + path, headers=client, timeout=60).status_code == 403
        assert httpx2.post(trained.url + path, timeout=60).status_code == 401
        basic = trained.url.replace("://", "://trl:wrong-key-0000@") + path
        assert httpx2.post(basic, timeout=60).status_code == 401
        assert httpx2.post(server.url + path, timeout=60).status_code == 404  # without the option
