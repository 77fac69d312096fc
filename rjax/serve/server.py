"""Runs the app in uvicorn: sockets, signals and shutdown."""

import asyncio
import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from rjax.async_engine import AsyncLLMEngine, QueueLimits
from rjax.errors import InvalidConfigError
from rjax.memory_sizes import GIB
from rjax.serve.app import build_app
from rjax.serve.auth import KeyRing
from rjax.serve.connections import ConnectionLimiter
from rjax.serve.fields import UnknownFields
from rjax.serve.http_protocol import BoundedProtocol
from rjax.serve.limits import ServeLimits
from rjax.serve.metrics import Metrics
from rjax.serve.options import HttpOptions
from rjax.serve.reasoning import choose_output_format
from rjax.serve.responses_api.store import ResponseStore
from rjax.serve.service import Service
from rjax.serve.structured_outputs import GrammarCache
from rjax.serve.threads import WorkThreads
from rjax.serve.tools import choose_tool_format
from rjax.serve.workers.pool import WorkerLimits, WorkerPool
from rjax.serve.workers.tasks import TextModel
from rjax.serve.workers.zygote import Zygote

_FLUSH_SECONDS = 5  # for sending complete responses at shutdown
_DEAD_SECONDS = 2.0  # of 503 responses after the engine failed, before the server ends
_SWEEP_TICKS = 5  # of a tenth of a second, between two checks of the connections
_ACCEPT_BATCH = 16  # connections that uvicorn accepts in one turn of the event loop
_BACKLOG = 1024  # of the listening socket
_OTHER_FILES = 128  # file descriptors that are not connections
_log = logging.getLogger("rjax.serve")


def make_service(
    engine: Any,
    *,
    model: str,
    root: str | None = None,
    keys: KeyRing | None = None,
    limits: ServeLimits | None = None,
    tool_format: str = "auto",
    strict_fields: bool = False,
    reasoning_parser: str | None = None,
    literal_json_schemas: bool = False,
    http: HttpOptions | None = None,
    zygote: Zygote | None = None,
) -> Service:
    """Create the service of an engine with a tokenizer.

    Args:
        engine: an `rjax.engine.llm_engine.LLMEngine`; only the service may use it afterwards.
        model: served model name.
        root: the model's own name; the served name by default.
        keys: API keys; None needs no key.
        limits: of requests.
        tool_format: "auto", or a name of `rjax.serve.tools.TOOL_FORMATS`.
        strict_fields: refuse unknown fields of requests; otherwise each name is logged once.
        reasoning_parser: a name of `rjax.serve.reasoning.REASONING_PARSERS`; None leaves reasoning
            in the content.
        literal_json_schemas: do not close objects of JSON schemas without
            ``additionalProperties``.
        http: options for proxies and browsers.
        zygote: starts worker processes; None creates one, which the service closes.
    """
    limits = limits or ServeLimits()
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "a server speaks text"
    keys = keys or KeyRing([])
    if tokenizer.folder is None:
        raise InvalidConfigError(
            "the server's workers load the tokenizer from a folder, and this engine's did not come "
            "from one; save it with save_pretrained and give the folder"
        )
    template = tokenizer.hf.chat_template
    vocab_size = engine.model_config.vocab_size
    tools = choose_tool_format(tool_format, tokenizer)
    text_model = TextModel(
        folder=str(tokenizer.folder),
        chat_template=template if isinstance(template, str) else None,
        vocab_size=vocab_size,
        eos_token_ids=sorted(tokenizer.eos_token_ids),
    )
    own_zygote = zygote is None
    zygote = zygote or Zygote()

    def workers(quick: int, seconds: float) -> WorkerPool:
        bounds = WorkerLimits(
            quick=quick,
            slow=limits.slow_tasks,
            queued=limits.queued_texts,
            wait_seconds=limits.template_seconds,
            task_seconds=seconds,
            task_bytes=limits.worker_bytes,
        )
        return WorkerPool(zygote, text_model, bounds, shared=len(keys.tenants) > 1)

    texts = workers(limits.text_workers, limits.template_seconds)
    compilers = workers(limits.grammar_workers, limits.grammar_seconds)
    threads = WorkThreads(4)
    grammars = GrammarCache(tokenizer, vocab_size, limits, compilers, threads)
    return Service(
        engine=AsyncLLMEngine(
            engine,
            QueueLimits(
                sequences=limits.queued_sequences,
                prompt_tokens=limits.queued_tokens,
                heartbeat_seconds=limits.heartbeat_seconds,
                unread_tokens=limits.unread_tokens,
            ),
        ),
        tokenizer=tokenizer,
        model=model,
        root=root or model,
        created=int(time.time()),
        max_model_len=engine.max_model_len,
        vocab_size=vocab_size,
        unknown_fields=UnknownFields(strict=strict_fields),
        limits=limits,
        keys=keys,
        metrics=Metrics(model, _cache_figures(engine)),
        grammars=grammars,
        zygote=zygote if own_zygote else None,
        texts=texts,
        compilers=compilers,
        threads=threads,
        response_threads=WorkThreads(2),
        tools=tools,
        output_format=choose_output_format(
            reasoning_parser, tools, tool_format, tokenizer, grammars.special_tokens
        ),
        literal_json_schemas=literal_json_schemas,
        responses=ResponseStore(limits.responses, limits.responses_bytes),
        http=http or HttpOptions(),
    )


class Server(uvicorn.Server):
    """A uvicorn server with graceful shutdown.

    The first SIGTERM or SIGINT starts to drain: /health and new requests get a 503 with
    Retry-After, and accepted requests continue for at most ``drain_seconds``. A second signal stops
    immediately.

    If the engine stops on an error, all requests get a 503 and the server ends after two seconds,
    with ``engine.failed`` set. The engine is not restarted.

    Args:
        service: started and stopped with the server.
        drain_seconds: for accepted requests.
        access_log: log a line per request.
        ready: called when the port is open.
    """

    def __init__(
        self,
        service: Service,
        *,
        drain_seconds: float = 30.0,
        access_log: bool = False,
        ready: Callable[[], None] | None = None,
    ) -> None:
        limits = service.limits
        self._open = ConnectionLimiter(limits, _max_open_connections(limits))
        super().__init__(
            uvicorn.Config(
                build_app(service),
                http=functools.partial(
                    BoundedProtocol, self._open, service.http.health_paths, limits.retry_after
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
        self.service = service
        self._drain_seconds = drain_seconds
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._dead_since: float | None = None

    async def run_on(self, listener: socket.socket) -> None:
        """Listen on a bound socket and serve until stopped."""
        self._loop = asyncio.get_running_loop()
        await self.service.engine.start()
        try:
            await self.service.texts.start()
            await self.serve(sockets=[listener])
        finally:
            await self.service.engine.stop()
            self.service.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port."""
        await super().startup(sockets)
        for listener in sockets or []:  # uvicorn uses one value for backlog and accept batch
            listener.listen(_BACKLOG)
        if self._ready is not None:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Check connections and engine, ten times a second; return whether to stop."""
        if counter % _SWEEP_TICKS == 0:
            self._open.sweep()
        if self.service.engine.failed:
            now = time.monotonic()
            self._dead_since = self._dead_since or now
            if now - self._dead_since > _DEAD_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Drain and stop; the second call stops immediately. Call it in the server's event loop."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.force_exit = True
            self.should_exit = True
            self._stopping = asyncio.ensure_future(self.service.engine.stop())

    async def _drain(self) -> None:
        engine = self.service.engine
        _log.info("stopping: %d requests to finish", engine.num_live)
        if not await engine.drain(self._drain_seconds):
            _log.warning(
                "%d requests are cut off after %g seconds", engine.num_live, self._drain_seconds
            )
            await engine.stop()
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


def _cache_figures(engine: Any) -> dict[str, object]:
    """Settings of the KV pool, with vLLM's names."""
    settings, stats = engine.config.cache, engine.stats()
    return {
        "block_size": settings.page_size,
        "num_gpu_blocks": stats.kv_bytes_total // stats.page_bytes,
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "swap_space": settings.swap_bytes / GIB,
    }


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one. Clients are refused until
    the server listens.

    Raises:
        OSError: the address is in use or not local.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setblocking(False)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"{host} port {port}: {error.strerror}") from None
    return found
