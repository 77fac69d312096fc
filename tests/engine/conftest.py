"""Fixtures of the engine tests."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest

from .tiny import write_config


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Folder of the tiny model's configuration."""
    return write_config(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def no_annotations_checked() -> Iterator[None]:
    """Checking them would take much of the time of very many steps; other tests take them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield
