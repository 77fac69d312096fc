"""Fixtures of the server tests."""

import functools
import ssl
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .live_server import LiveServer, live_server, make_engine, write_model


@pytest.fixture(scope="package", autouse=True)
def _certificates_are_read_once() -> Iterator[None]:
    """Every client reads them, also for plain HTTP, and takes longer for it than for a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[LiveServer]:
    """One server for all tests that leave it as it was."""
    with live_server(make_engine(folder)) as found:
        yield found


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client on that server."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as found:
        yield found
