"""Comparing a folder of goldens with this package's own results."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from forward import jitted
from safetensors.numpy import load_file

from rjax import models

RELATIVE = 1e-4


def compare(goldens: Path, name: str) -> None:
    """Assert that logits and greedy tokens of one case equal those that transformers wrote."""
    expected = load_file(goldens / "expected" / f"{name}.safetensors")
    loaded = models.load_model(
        goldens / "models" / name,
        dtype="float32",
        progress=False,
        max_length=int(expected["positions"][-1]) + 1,
    )
    run = jitted(loaded.model)

    logits = np.asarray(run(expected["tokens"], expected["positions"])[1])
    wanted = expected["logits"]
    assert logits.shape == wanted.shape
    difference = np.abs(logits - wanted)
    assert np.linalg.norm(difference) <= RELATIVE * np.linalg.norm(wanted)
    assert difference.max() <= RELATIVE * np.abs(wanted).max()

    if "greedy" not in expected:
        return
    # Later tokens do not reach back, so one padded length serves every step.
    prompt, greedy = expected["prompt"], expected["greedy"]
    tokens = jnp.zeros(len(expected["tokens"]), jnp.int32).at[: prompt.size].set(prompt)
    positions = jnp.arange(tokens.size)
    found = []
    for last in range(prompt.size - 1, prompt.size - 1 + greedy.size):
        found.append(int(run(tokens, positions)[1][last].argmax()))
        tokens = tokens.at[last + 1].set(found[-1])
    np.testing.assert_array_equal(found, greedy)
