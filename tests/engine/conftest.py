"""Fixtures of the engine tests."""

from pathlib import Path

import pytest

from .tiny import write_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Folder of the tiny model's configuration."""
    return write_config(tmp_path_factory.mktemp("model") / "tiny")
