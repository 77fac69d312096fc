"""The session's small server, spoken to with plain HTTP."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from ..live_server import LiveServer

Post = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="session")
def http(server: LiveServer) -> Iterator[httpx2.Client]:
    """A client of that server."""
    with httpx2.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def post(http: httpx2.Client) -> Post:
    """Status and JSON of an answer to ``post(route, **body)``; greedy by default."""

    def send(route: str, **body: Any) -> tuple[int, Any]:
        given = {"model": "tiny", "temperature": 0} if route.startswith("/v1/") else {}
        answer = http.post(route, json=given | body)
        return answer.status_code, answer.json()

    return send


@pytest.fixture(scope="session")
def refused(post: Post) -> Callable[..., str]:
    """Message of the 400 that a body must get."""

    def send(route: str, **body: Any) -> str:
        status, answer = post(route, **body)
        assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"
        return answer["error"]["message"]

    return send
