"""Nothing that one request sets reaches another: alone == after any neighbours, all features on."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from .live_server import LiveServer

PLAIN = {"prompt": "Who lives in Peru?", "max_tokens": 10}
PROBES = [
    {**PLAIN, "temperature": 0},
    {**PLAIN, "temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.9},
    {**PLAIN, "temperature": 1, "seed": 8, "n": 3, "presence_penalty": 1},
]
NEIGHBOURS = [
    {"allowed_token_ids": [50, 51]},
    {"logit_bias": {"60": 100, "61": -100}},
    {"repetition_penalty": 3.0, "frequency_penalty": 2, "presence_penalty": 2},
    {"min_tokens": 10, "stop_token_ids": [70, 71]},
    {"structured_outputs": {"regex": "[xyz]{10}"}},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"temperature": 2, "top_p": 0.1, "min_p": 0.5, "top_k": 3, "seed": 1},
    {"temperature": 0},
    {"stop": ["a", "e", "i"], "include_stop_str_in_output": True},
    {"skip_special_tokens": False, "ignore_eos": True},
    {"prompt": [3, 4, 5], "seed": 5, "n": 2, "priority": -1},
    {"logprobs": 5, "echo": True, "n": 2},
    {"best_of": 3, "seed": 4},
    {"bad_words": ["a", "Who lives", "the"], "n": 2},
    {"prompt_logprobs": 2, "cache_salt": "apart"},
    {"max_tokens": 0, "echo": True, "logprobs": 0},
    {"prompt": ["Who lives in Peru?", "Who lives in"], "structured_outputs": {"choice": ["red"]}},
    {"temperature": 1.9, "presence_penalty": -2, "logit_bias": {"70": 5}, "min_tokens": 3},
]


def ask(server: LiveServer, body: dict) -> list[str]:
    found = httpx2.post(server.url + "/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return [choice["text"] for choice in found.json()["choices"]]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_alone_is_as_after_and_beside_any_neighbours(server: LiveServer, seed):
    draw = random.Random(seed)
    alone = [ask(server, probe) for probe in PROBES]
    rounds = 2 if seed == 0 else 12
    for _ in range(rounds):
        others = [{**PLAIN, "temperature": 1, **n} for n in draw.sample(NEIGHBOURS, 8)]
        jobs = [("other", o) for o in others] + [("probe", i) for i in range(len(PROBES))] * 2
        draw.shuffle(jobs)
        with ThreadPoolExecutor(12) as pool:
            found = [
                (kind, what, pool.submit(ask, server, PROBES[what] if kind == "probe" else what))
                for kind, what in jobs
            ]
        for kind, what, job in found:
            if kind == "probe":
                assert job.result() == alone[what], json.dumps(others)
            else:
                job.result()
    assert [ask(server, probe) for probe in PROBES] == alone
