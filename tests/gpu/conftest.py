"""Every test here needs an NVIDIA GPU."""

import gc

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.fixture(autouse=True)
def _memory_for_the_next():
    yield
    gc.collect()  # which the tests' set-up makes seldom
