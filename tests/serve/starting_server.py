"""A server whose model is not loaded until a test says so."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2

from rjax.batch.compile_progress import CompileProgress
from rjax.serve.api.app import build_app
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import EarlyRequests, StartingApp
from rjax.serve.loading.service_builder import make_service

from .hostile import until
from .live_server import running, zygote

KEY = "first-key-1234"
PAGE = "https://page.example"
BEARER = {"Authorization": f"Bearer {KEY}"}
SHORT = {"prompt": "Who lives in Peru?", "max_tokens": 5, "temperature": 0}
SOON = 40.0  # seconds; the machine may be busy


@dataclasses.dataclass
class Starting:
    """A server whose model is loaded once ``loaded`` is set."""

    url: str
    app: StartingApp
    loaded: threading.Event
    ready: threading.Event
    clients: ThreadPoolExecutor

    def post(self, **more: Any) -> httpx2.Response:
        return httpx2.post(
            self.url + "/v1/completions", json=SHORT | more, headers=BEARER, timeout=60
        )

    def begin(self, body: dict[str, Any] = SHORT, path: str = "/v1/completions") -> Future:
        """Send a request on a thread; returns when it waits in the server."""
        before = self.app._waiting
        sent = self.clients.submit(
            httpx2.post, self.url + path, json=body, headers=BEARER, timeout=120
        )
        until(lambda: self.app._waiting > before, SOON)
        return sent

    def load(self) -> None:
        """Let the model be loaded, and wait until the server is ready."""
        self.loaded.set()
        assert self.ready.wait(60)


@contextlib.contextmanager
def starting(
    engine: Any, early_requests: EarlyRequests = "wait", **limits: Any
) -> Iterator[Starting]:
    loaded, ready = threading.Event(), threading.Event()
    config = ServeConfig(
        model="tiny",
        created=1,
        keys=(KEY,),
        limits=ServeLimits(**limits),
        http=HttpOptions(root_path="/llm", allowed_origins=(PAGE,)),
    )

    def build() -> Any:
        assert loaded.wait(60)
        service = make_service(engine, config, zygote=zygote())
        return service, build_app(service)

    app = StartingApp(
        config,
        early_requests=early_requests,
        progress=lambda: CompileProgress(3, 20),
    )
    server = Server(app, build, ready=ready.set)
    with ThreadPoolExecutor() as clients, running(server) as (url, _):
        try:
            yield Starting(url, app, loaded, ready, clients)
        finally:
            loaded.set()
