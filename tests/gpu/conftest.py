"""Every test here needs an NVIDIA GPU."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def _gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")
