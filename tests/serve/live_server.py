"""A server on a thread of the test run, over a tiny random model with a fixed tokenizer."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.serve.api import prefixes
from rjax.serve.api.app import build_app
from rjax.serve.api.service import Service
from rjax.serve.config.addresses import Address, HostAddress
from rjax.serve.config.limits import ServeLimits
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.loading.service_builder import make_service
from rjax.serve.workers.zygote import Zygote
from tests.kept_programs import kept_programs

LENGTH = 512
_ANY_PORT = HostAddress("127.0.0.1", 0)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
OPTIONS = {
    "load_format": "dummy",
    "page_size": 8,
    "num_pages": 1024,
    # Few shapes of steps: each is compiled once for each set of features that a test uses.
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "use_tqdm": False,
    "seed": 5,
}


TOKENIZER = Path(__file__).parents[1] / "golden" / "tokenizer"


def write_model(folder: Path) -> Path:
    """A model folder: a tokenizer that no training changes, a tiny configuration, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)
    vocab = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    added = len(json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    size = -(-(vocab + added) // 64) * 64  # wider than the tokenizer, as models are
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size}))
    return folder


def make_engine(folder: Path, **options: Any) -> LLMEngine:
    """An engine over that folder."""
    with kept_programs():
        return build_engine(EngineConfig.from_options({"model": str(folder), **OPTIONS, **options}))


@functools.cache
def zygote() -> Zygote:
    """One for all servers of the test run: it takes seconds to import what workers need."""
    found = Zygote()
    atexit.register(found.close)
    return found


@dataclasses.dataclass
class LiveServer:
    """A server that listens.

    Attributes:
        url: without a path.
        service: of its app.
        server: to stop it by.
        loop: that it runs in.
    """

    url: str
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop

    def call(self, function: Any) -> Any:
        """``function(engine)`` on the engine's thread."""
        made = self.service.engine.call(function)
        return asyncio.run_coroutine_threadsafe(made, self.loop).result(120)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until no request is live and the engine has nothing to do."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.service.engine.num_live == 0 and not self.call(
                lambda engine: engine.has_unfinished_requests()
            ):
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.service.engine.num_live} requests are still live")

    def used_bytes(self) -> int:
        """KV held by sequences, once the prefix cache is dropped."""

        def used(engine: Any) -> int:
            engine.reset_prefix_cache()
            return engine.stats().kv_bytes_used

        return self.call(used)


@contextlib.contextmanager
def live_server(
    engine: Any,
    *,
    model: str = "tiny",
    keys: list[str] | None = None,
    limits: ServeLimits | None = None,
    prefix_files: dict[str, str] | None = None,
    send_buffer: int | None = None,
    **more: Any,
) -> Iterator[LiveServer]:
    """A server for the length of the block, on a free port of this machine. ``send_buffer`` is what
    the kernel keeps of an answer that is not read, in bytes."""
    config = ServeConfig(
        model=model, keys=tuple(keys or ()), limits=limits or ServeLimits(), **more
    )
    service = make_service(engine, config, zygote=zygote())
    prefixes.load(prefix_files or {}, service)
    app = StartingApp(config)
    ready = threading.Event()
    server = Server(app, lambda: (service, build_app(service)), ready=ready.set)
    with running(server, send_buffer=send_buffer) as (url, loop):
        assert ready.wait(60), "the server did not start"
        yield LiveServer(url, service, server, loop)


@contextlib.contextmanager
def running(
    server: Server, *, send_buffer: int | None = None, address: Address = _ANY_PORT
) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """Run a server on a thread, and yield its URL and event loop once the port is open."""
    with address.bound() as listener, _running(server, listener, send_buffer) as loop:
        yield address.url(listener), loop


@contextlib.contextmanager
def _running(
    server: Server, listener: socket.socket, send_buffer: int | None
) -> Iterator[asyncio.AbstractEventLoop]:
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(server.run_on(listener),), daemon=True
    )
    thread.start()
    end = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < end, "the port did not open"
        time.sleep(0.01)
    try:
        yield loop
    finally:
        server.should_exit = True
        thread.join(60)
        alive = thread.is_alive()
        if not alive:
            loop.close()
        assert not alive, "the server did not stop"
