"""Engines answer what was recorded, bit for bit on the kind of machine that recorded it."""

import json

import numpy as np
import pytest

from .recorded import FILE, MODELS, RELAY, answers, machine

RECORDED = json.loads(FILE.read_text())
THOROUGH = {("opt_h64_tied", False)}


@pytest.mark.parametrize(
    ("name", "relay"),
    [
        pytest.param(
            name,
            relay,
            marks=pytest.mark.thorough if (name, relay) in THOROUGH else pytest.mark.slow,
        )
        for name in MODELS
        for relay in RELAY
    ],
)
def test_answers_are_those_recorded(name, relay):
    wanted = RECORDED["answers"][name][str(relay)]
    found = answers(MODELS[name], relay)
    if RECORDED["machine"] == machine():
        assert found == wanted
    for one, other in zip(found, wanted, strict=True):
        assert one["tokens"] == other["tokens"]
        ours, theirs = (
            np.frombuffer(bytes.fromhex(each["logprobs"]), ">f4") for each in (one, other)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)
