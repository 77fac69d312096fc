"""Fixtures of the benchmarks' tests."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quickly_compiled_random_numbers() -> Iterator[None]:
    """For tests that draw inputs of many shapes: most of their time would be compiling Threefry."""
    with jax.default_prng_impl("rbg"):
        yield
