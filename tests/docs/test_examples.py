"""Every example runs as a user runs it, and prints what its pages say."""

import re

import pytest

from tests.docs.generated import EXAMPLES
from tests.docs.processes import run_python

PRINTS = {
    "asyncio_streams": [
        "The highest age is 86, so the oldest person is Subramanian Albuquerque",
        "cancelled; 0 sequences are running",
    ],
    "first_steps": [
        "A: From Puerto Rico: 1. Andrea Nwachukwu. Total: 1.",
        "completed: The table has 24 people. (stop)",
        "streamed: The occupation of Hollie Smigiel is perfumer.",
    ],
    "graph_embeddings": ["pages: 0 used, 24 cached, 0 free"],
    "grpo": ["reward before: ", "reward after: "],
    "grpo_with_engine": ["reward before: ", "logprobs of engine and trainer", "reward after: "],
    "many_prefixes": [
        "pinned: team-0, team-1, team-2",
        "team-2 by its name: The highest age is 86",
    ],
    "sample_in_your_jit": [
        "What is Hollie Smigiel's job? The occupation of Hollie Smigiel is perfumer."
    ],
    "saved_prefix": ["(0 of 1830 prompt tokens cached)", "loaded: table"],
    "scoring": ["perfumer: log-probability -0.00, greedy: True", "glassblower", "beam -0.00: The"],
    "shared_system_prompt": [
        "The table has 24 people.",
        "after the change: The table has 4 people.",
    ],
    "structured_output": [
        "JSON: {'answer': 'The age of Andrea Nwachukwu is 26.'}",
        "choice: The occupation of Hollie Smigiel is perfumer.",
        "regex: The highest age is 86",
    ],
    "tools_over_openai": [
        "the model calls read_table(",
        "The occupation of Hollie Smigiel is perfumer.",
    ],
}
"""Texts that the output holds, by example."""

ARGUMENTS = {name: ["--steps", "1", "--held-out", "1"] for name in ("grpo", "grpo_with_engine")}


def run(name: str, *arguments: str) -> str:
    """The output of an example, run from the shell."""
    return run_python("-m", f"rjax.examples.{name}", *arguments, optimise=True)


def check_shared_system_prompt(out: str) -> None:
    read, unshared = re.findall(r"[0-9,]+", out.split("KV tokens read: ")[1])[:2]
    assert int(read.replace(",", "")) < int(unshared.replace(",", ""))


def check_graph_embeddings(out: str) -> None:
    total, on_device, on_host, computed = map(int, re.findall(r"\d+", out)[:4])
    assert total == on_device + on_host + computed
    assert min(on_device, on_host, computed) > 0
    assert "largest difference from computing everything: 0.0e+00" in out


CHECKS = {
    "shared_system_prompt": check_shared_system_prompt,
    "graph_embeddings": check_graph_embeddings,
}


def test_every_example_is_tested():
    assert len(EXAMPLES) >= 10
    assert {path.stem for path in EXAMPLES} == PRINTS.keys()


@pytest.mark.sample(0, 5)
@pytest.mark.parametrize("name", sorted(PRINTS))
def test_example(name: str):
    out = run(name, *ARGUMENTS.get(name, []))
    for text in PRINTS[name]:
        assert text in out, out
    if name in CHECKS:
        CHECKS[name](out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "grpo_with_engine"])
def test_grpo_raises_the_reward(name: str):
    out = run(name)
    before, after = (float(value) for value in re.findall(r"(?:before|after): ([0-9.]+)", out))
    assert after > before + 0.2
