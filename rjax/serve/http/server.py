"""Runs the app in uvicorn: sockets, signals, start and shutdown."""

import asyncio
import functools
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from rjax.errors import InvalidConfigError
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.backend import Backend
from rjax.serve.http.connections import ConnectionLimiter
from rjax.serve.http.http_protocol import BoundedProtocol
from rjax.serve.http.loop_turns import LoopTurns
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.http.threads import run_on_new_thread
from rjax.serve.protocol.errors import ApiError

_FLUSH_SECONDS = 5  # for sending complete responses at shutdown
_DEAD_SECONDS = 2.0  # of 503 responses after the engine failed, before the server ends
_SWEEP_TICKS = 5  # of a tenth of a second, between two checks of the connections
_ACCEPT_BATCH = 16  # connections that uvicorn accepts in one turn of the event loop
_REQUESTS_A_TURN = 8  # of the event loop; parsing one takes up to a millisecond
_BACKLOG = 1024  # of the listening socket
_OTHER_FILES = 128  # file descriptors that are not connections
_log = logging.getLogger("rjax.serve")


class Server(uvicorn.Server):
    """A uvicorn server that builds its service after it opened the port, and stops gracefully.

    The service is built on a thread. SIGTERM starts to drain: /health and new requests get a 503
    with Retry-After, and accepted requests continue for at most ``drain_seconds``. A second signal,
    and any SIGINT (Ctrl-C), stops immediately. A signal before the service is ready stops without
    waiting for the thread.

    If the service fails (its engine stopped on an error), all requests get a 503 and the server
    ends after two seconds. The engine is not restarted.

    Args:
        app: answers until the service is ready, and then delegates to the service's app.
        build: returns the service and its app; runs on a thread.
        drain_seconds: most seconds for which accepted requests continue after SIGTERM.
        access_log: log a line per request.
        stats_seconds: log the throughput in this interval; None never.
        listening: called when the port is open.
        ready: called when the service is ready.
        interrupted: called on SIGINT.

    Attributes:
        service: the service; None until it is ready.
        stopped_by: the signal that stopped the server without draining, or None.
    """

    def __init__(
        self,
        app: StartingApp,
        build: Callable[[], tuple[Backend, ASGIApp]],
        *,
        drain_seconds: float = 30.0,
        access_log: bool = False,
        stats_seconds: float | None = None,
        listening: Callable[[], None] | None = None,
        ready: Callable[[], None] | None = None,
        interrupted: Callable[[], None] | None = None,
    ) -> None:
        limits = app.limits
        self._open = ConnectionLimiter(limits, _max_open_connections(limits))
        turns = LoopTurns(_REQUESTS_A_TURN)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(
                    BoundedProtocol, self._open, turns, app.http.health_paths, limits.retry_after
                ),  # type: ignore[arg-type]
                backlog=_ACCEPT_BATCH,
                ws="none",
                lifespan="off",
                access_log=access_log,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.header_bytes,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        self.service: Backend | None = None
        self.stopped_by: int | None = None
        self._app = app
        self._build = build
        self._failure: Exception | None = None
        self._drain_seconds = drain_seconds
        self._listening = listening
        self._ready = ready
        self._interrupted = interrupted
        self._stats_seconds = stats_seconds
        self._logging: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._dead_since: float | None = None

    async def run_on(self, listener: socket.socket) -> None:
        """Listen on a bound socket, build the service, and serve until stopped.

        Raises:
            Exception: the service could not be built, or a callback failed.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self.serve(sockets=[listener])
        finally:
            for task in (self._starting, self._logging):
                if task is not None:
                    task.cancel()
            if self.service is not None:
                await self.service.stop()
                self.service.close()
        if self._failure is not None and self.stopped_by is None:
            raise self._failure

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port."""
        await super().startup(sockets)
        for listener in sockets or []:  # uvicorn uses one value for backlog and accept batch
            listener.listen(_BACKLOG)
        if self._listening is not None:
            self._listening()
        self._starting = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        """Build the service and hand all requests to its app."""
        try:
            service, app = await run_on_new_thread(self._build, "rjax-start")
            self.service = service
            await service.start()
            self._app.open(app)
            if self._ready is not None:
                self._ready()
            if self._stats_seconds is not None:
                self._logging = asyncio.ensure_future(service.log_throughput(self._stats_seconds))
        except Exception as error:
            self._failure = error
            self._app.fail("dead", ApiError(503, "the server could not start", code="engine_dead"))
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Check connections and engine, ten times a second; return whether to stop."""
        if counter % _SWEEP_TICKS == 0:
            self._open.sweep()
        if self.service is not None and self.service.failed:
            now = time.monotonic()
            self._dead_since = self._dead_since or now
            if now - self._dead_since > _DEAD_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        """Drain and stop; SIGINT and a second signal stop immediately."""
        if sig == signal.SIGINT and self._interrupted is not None:
            self._interrupted()
        if self.service is None:
            _log.info("stopping before the model is loaded")
            self.stopped_by = sig
            error = ApiError(503, "the server is shutting down; ask another one", code="overloaded")
            self._app.fail("draining", error)
            self.force_exit = self.should_exit
            self.should_exit = True
        elif self._draining is None and sig != signal.SIGINT:
            self._draining = asyncio.ensure_future(self._drain(self.service))
        else:
            if sig == signal.SIGINT:
                _log.info("interrupted: %d requests are cut off", self.service.num_live)
                self.stopped_by = sig
            self.force_exit = True
            self.should_exit = True
            self._stopping = asyncio.ensure_future(self.service.stop())

    async def _drain(self, service: Backend) -> None:
        _log.info("stopping: %d requests to finish", service.num_live)
        if not await service.drain(self._drain_seconds):
            _log.warning(
                "%d requests are cut off after %g seconds", service.num_live, self._drain_seconds
            )
            await service.stop()
        self.should_exit = True


def set_ulimit(limits: ServeLimits) -> None:
    """Raise the soft limit of open files to what the connections need, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.open_connections + limits.health_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _max_open_connections(limits: ServeLimits) -> int:
    """Maximum of connections by ``open_connections`` and the limit of open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = files - _OTHER_FILES - limits.health_connections
    if files == resource.RLIM_INFINITY or room >= limits.open_connections:
        return limits.open_connections
    if room < 1:
        raise InvalidConfigError(
            f"this process may open {files} files, too few for connections; raise ulimit -n"
        )
    _log.warning(
        "this process may open %d files: at most %d connections; raise ulimit -n, or set "
        "open_connections",
        files,
        room,
    )
    return room
