"""Sizes of host memory as users write them."""

import argparse
from typing import Any

import pytest

from rjax.cli.arguments import add_engine_arguments, given_engine_options
from rjax.config import CacheSettings, EngineConfig, engine_config, memory_sizes
from rjax.errors import InvalidConfigError

GIB = 2**30


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 GiB."""
    monkeypatch.setattr(memory_sizes, "host_memory", lambda: 64 * GIB)
    monkeypatch.setattr(engine_config, "host_memory", lambda: 64 * GIB)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, 4 * GIB),
        (0, 0),
        (4, 4 * GIB),
        (0.5, GIB // 2),
        ("4", 4 * GIB),
        ("1.5", 3 * GIB // 2),
        ("4GiB", 4 * GIB),
        (" 4 gib ", 4 * GIB),
        ("512MiB", 512 * 2**20),
        ("4GB", 4 * 10**9),
        ("250 kB", 250_000),
        ("100B", 100),
        (64, 64 * GIB),
    ],
)
def test_sizes(given: Any, size: int) -> None:
    assert CacheSettings(swap_space=given).swap_bytes == size


@pytest.mark.parametrize(
    "given",
    [-1, float("nan"), float("inf"), 65, 4 * GIB, 10**400, True, False, "", "GiB", "-1", "4 quarts",
     "4G4", "1e3", "nan", "65GiB", "9" * 400, [4], b"4"],
)  # fmt: skip
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"swap_space is .*GiB.* to the 64\.0 GiB of this"):
        CacheSettings(swap_space=given)


def test_the_default_fits_a_small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "host_memory", lambda: 2 * GIB)
    assert CacheSettings().swap_bytes == GIB


def test_the_command_line_takes_the_same() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    for text, size in (("2", 2 * GIB), ("512MiB", 2**29)):
        options = given_engine_options(parser.parse_args(["--swap-space", text]))
        assert EngineConfig.from_options(options).cache.swap_bytes == size


def test_what_the_host_has() -> None:
    assert 0 < memory_sizes.available_memory() < 2**50
