"""What a streamed token costs the server on the host, without a device.

    python -m bench.server_host                       # token ids, 64 and 256 streams
    python -m bench.server_host --engine thread       # with the engine in the server's process
    python -m bench.server_host --chat --streams 64   # chats
    python -m bench.server_host --stop --logprobs 5   # text with stop strings and logprobs
    python -m bench.server_host --url http://127.0.0.1:8000   # the same load on a running server

The real server and engine, over a worker that packs every step and then waits for ``--step-ms``
instead of a device. Clients are raw sockets in processes of their own. "Share" is the throughput
over that of a device that never waits, streams / step; "loop" and "engine" are the CPU time of the
event loop and of the engine's thread, per streamed chunk. TTFT and gaps are what clients see. CPU
times hold on a machine with other load; the others need cores of their own. Of a running server,
which may be of another engine, only the clients' figures are known.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import multiprocessing
import os
import pathlib
import platform
import sys
import threading
import time
import urllib.parse
from typing import Any

import numpy as np

from bench.command_line import run
from bench.scheduler import HostOnlyWorker
from bench.serve.load import ServerLoad, measure_load
from rjax.batch.compile_progress import CompileProgress
from rjax.batch.dispatched_step import DispatchedStep
from rjax.batch.page_hash import root_key
from rjax.batch.step_limits import StepLimits
from rjax.batch.step_readout import HostLogprobs, StepReadout
from rjax.benchmarks.stream_client import Address
from rjax.benchmarks.text_tables import text
from rjax.cli.parser import OneLineParser
from rjax.cli.values import whole
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.engine.parts import EngineParts
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.models import BUNDLED_MODEL, config_from_folder, resolve_folder
from rjax.serve.api.app import build_app
from rjax.serve.config.addresses import bind
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.loading.service_builder import make_service
from rjax.tokenization import Tokenizer

COLUMNS = {
    "work": "work",
    "engine": "engine",
    "streams": "streams",
    "share": "share",
    "tokens_per_s": "tok/s",
    "loop_us": "loop us/chunk",
    "engine_us": "engine us/chunk",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p99": "p99",
    "gap_ms_p50": "gap p50 ms",
    "gap_ms_p99": "p99",
    "gap_ms_max": "max",
}


class PacedWorker(HostOnlyWorker):
    """Does the host's work of each step; the device's is a wait."""

    def __init__(self, limits: StepLimits, vocab_size: int, step_seconds: float) -> None:
        super().__init__(limits, None)
        self._tokens = np.random.default_rng(0).integers(40, vocab_size, 2**16).astype(np.int32)
        self._step_seconds = step_seconds
        self._free_at = 0.0
        self._steps = 0

    def dispatch(self, batch, tables, *, may_queue, streams) -> DispatchedStep:
        """Dispatch to a device that runs one step after the other."""
        step = super().dispatch(batch, tables, may_queue=may_queue, streams=streams)
        self._free_at = max(self._free_at, time.monotonic()) + self._step_seconds
        return dataclasses.replace(step, result=self._free_at)

    def read(self, step) -> StepReadout:
        """Wait for the device; tokens are drawn at random."""
        time.sleep(max(0.0, step.result - time.monotonic()))
        self._steps += 1
        start = self._steps * 977 % (len(self._tokens) - len(step.batch))
        rows = len(step.batch)
        return StepReadout(self._tokens[start : start + rows], self._logprobs(rows), None)

    def compile_progress(self) -> CompileProgress:
        """Nothing compiles."""
        return CompileProgress(0, 0)

    def close(self) -> None:
        """Nothing to free."""

    def _logprobs(self, rows: int) -> HostLogprobs:
        return HostLogprobs(
            np.full(rows, -1.5, np.float32),
            np.ones(rows, np.int32),
            np.tile(np.arange(40, 60, dtype=np.int32), (rows, 1)),
            np.tile(np.linspace(-1.5, -9, 20, dtype=np.float32), (rows, 1)),
        )


class _Clocks:
    """CPU time of the event loop and of the engine's thread, in this process or in another."""

    def __init__(self, channel: EngineChannel) -> None:
        loop = threading.main_thread().ident
        assert loop is not None
        self._loop = time.pthread_getcpuclockid(loop)
        self._channel = channel

    def read(self) -> list[float]:
        """Seconds of the event loop and of the engine."""
        return [time.clock_gettime(self._loop), self._engine()]

    def _engine(self) -> float:
        if isinstance(self._channel, ProcessChannel):  # its main thread is the engine's
            pid = self._channel.process.pid
            fields = pathlib.Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2]
            user, system = fields.split()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        assert isinstance(self._channel, ThreadChannel)
        thread = self._channel.thread
        assert thread is not None and thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def make_engine(num_seqs: int, step_seconds: float) -> LLMEngine:
    """An engine over a `PacedWorker`; also the factory of an engine process."""
    folder = resolve_folder(BUNDLED_MODEL)
    model = config_from_folder(folder)
    tokenizer = Tokenizer(folder, model_folder=folder)
    limits = StepLimits(num_seqs, 8192)
    config = EngineConfig.from_options(
        {"max_num_seqs": num_seqs, "max_num_batched_tokens": 8192, "page_size": 64}
    )
    return LLMEngine(
        EngineParts(
            config=config,
            worker=PacedWorker(limits, len(tokenizer.hf), step_seconds),
            vocab_size=model.vocab_size,
            max_model_len=8192,
            limits=limits,
            identity=root_key("bench"),
            tokenizer=tokenizer,
            model_config=model,
        )
    )


def _open_channel(settings: dict[str, Any]) -> EngineChannel:
    arguments = {name: settings[name] for name in ("num_seqs", "step_seconds")}
    if settings["engine"] == "thread":
        return ThreadChannel(make_engine(**arguments))
    channel = ProcessChannel("bench.server_host:make_engine", arguments)
    channel.wait_ready()
    return channel


def _serve(settings: dict[str, Any], pipe: Any) -> None:
    """Serve in this process: sends the port, and the threads' CPU times whenever it is asked."""
    channel = _open_channel(settings)
    config = ServeConfig(model="bench")
    service = make_service(channel, config)
    routes = build_app(service)
    gc.collect()
    gc.freeze()  # as `rjax serve` does
    app = StartingApp(config)
    listener = bind("127.0.0.1", 0)

    def ready() -> None:
        clocks = _Clocks(channel)

        def answer() -> None:
            pipe.send(listener.getsockname()[1])
            while pipe.recv():
                pipe.send(clocks.read())
            server.should_exit = True

        threading.Thread(target=answer, daemon=True).start()

    server = Server(app, lambda: (service, routes), ready=ready)
    asyncio.run(server.run_on(listener))


def _load(streams: int, options: argparse.Namespace) -> ServerLoad:
    return ServerLoad(
        streams=streams,
        max_tokens=options.max_tokens,
        chat=options.chat,
        stop=options.stop,
        usage=options.usage,
        logprobs=options.logprobs,
        model=options.model,
    )


def measure(streams: int, step_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    """One load, after one like it that fills the prefix cache and opens all paths."""
    pipe, server_end = multiprocessing.Pipe()
    settings = {
        "num_seqs": streams,
        "step_seconds": step_ms / 1e3,
        "engine": options.engine,
    }
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(settings, server_end))
    server.start()
    try:
        work = {"work": _load(streams, options).name, "engine": options.engine}
        return {**work, **_measure(streams, step_ms, options, pipe)}
    finally:
        pipe.send(False)
        server.join(30)
        server.kill()


def _measure(
    streams: int, step_ms: float, options: argparse.Namespace, pipe: Any
) -> dict[str, Any]:
    port = pipe.recv()

    def clocks() -> list[float]:
        pipe.send(True)
        return pipe.recv()

    spent: list[list[float]] = []
    found = measure_load(
        Address("127.0.0.1", port),
        _load(streams, options),
        options.clients,
        lambda: spent.append(clocks()),
    )
    loop, engine = (b - a for a, b in zip(*spent, strict=True))
    return {
        "streams": streams,
        "step_ms": step_ms,
        "share": found["tokens_per_s"] * step_ms / 1e3 / streams,
        "loop_us": loop / found["chunks"] * 1e6,
        "engine_us": engine / found["chunks"] * 1e6,
        **found,
    }


def main() -> None:
    """Measure each number of streams and print a table."""
    parser = OneLineParser(
        prog="python -m bench.server_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--streams", type=whole(1), nargs="+", default=[64, 256], help="(default: 64 256)"
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs="+",
        default=[4.1, 13.0],
        help="milliseconds of a step, one for each number of streams (default: 4.1 13)",
    )
    parser.add_argument("--max-tokens", type=whole(2), default=128, help="of a stream")
    parser.add_argument("--clients", type=whole(1), default=2, help="client processes (default: 2)")
    parser.add_argument(
        "--engine",
        choices=("process", "thread"),
        default="process",
        help="where the engine runs (default: process, as in rjax serve)",
    )
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--stop", action="store_true", help="three stop strings")
    parser.add_argument("--usage", action="store_true", help="usage in each chunk")
    parser.add_argument("--logprobs", type=int, default=0, metavar="N", help="of each token")
    parser.add_argument("--json", type=pathlib.Path, help="file for the result as JSON")
    parser.add_argument("--url", help="of a running server, without /v1")
    parser.add_argument("--model", default="bench", help="name on that server")
    options = parser.parse_args()
    if len(options.step_ms) != len(options.streams):
        parser.error("--step-ms has one number for each of --streams")
    if options.url is None:
        each = zip(options.streams, options.step_ms, strict=True)
        rows = [measure(*one, options) for one in each]
    else:
        url = urllib.parse.urlsplit(options.url)
        if url.scheme != "http" or url.hostname is None:
            parser.error(f"--url {options.url}: give an address as http://127.0.0.1:8000")
        place = Address(url.hostname, url.port or 80)
        rows = []
        for load in (_load(streams, options) for streams in options.streams):
            found = measure_load(place, load, options.clients)
            rows.append({"work": load.name, "engine": "-", "streams": load.streams, **found})
    print(text(rows, COLUMNS))
    if options.json is not None:
        record = {
            "command": f"python -m bench.server_host {' '.join(sys.argv[1:])}".strip(),
            "rows": rows,
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run("bench.server_host", main)
