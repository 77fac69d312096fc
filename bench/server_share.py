"""What of the engine's speed reaches clients: the server beside the engine in process.

    python -m bench.server_share                                 # Llama-3-8B's shapes on a GPU
    python -m bench.server_share --streams 1024 --works completions
    python -m bench.server_share --warmup background --name server_share_compiling
    python -m bench.server_share --shapes tiny --streams 4 --max-tokens 8 --json share.json

Every stream has 2,048 shared and 64 unique prompt tokens; all arrive at once, with everything
compiled and the prefix cached. First one process runs the engine: `LLM.generate` has the throughput
that "/ in process" compares with, `AsyncLLM` the latencies that "/ AsyncLLM" compares with. Then
`rjax serve` with the same options gets the same load over HTTP, from raw sockets in processes of
their own. "cores" is the CPU time of the server's front end a second. Works: completions of token
ids, chats, chats with tools and reasoning, and text with stop strings and 5 logprobs a token.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from bench.command_line import command_parser, keep, run
from bench.serve.fleet import Fleet, fleet
from bench.serve.load import SHARED, UNIQUE, ServerLoad, latencies, measure_load
from bench.serve.model import write_served_model
from rjax.benchmarks.model_shapes import SHAPES
from rjax.benchmarks.records import record
from rjax.benchmarks.stream_client import Address
from rjax.cli.values import whole

COLUMNS = {
    "work": "work",
    "streams": "streams",
    "tokens_per_s": "tok/s",
    "share": "/ in process",
    "ttft_ms_p50": "TTFT p50, ms",
    "ttft_ms_p99": "p99, ms",
    "ttft_share": "/ AsyncLLM",
    "gap_ms_p50": "gap p50, ms",
    "gap_ms_p99": "p99, ms ",
    "gap_share": "/ AsyncLLM ",
    "gap_ms_max": "max, ms",
    "cores": "cores",
}
WORKS: dict[str, dict[str, Any]] = {
    "completions": {},
    "chats": {"chat": True},
    "tools": {"chat": True, "tools": True},
    "stop": {"stop": True, "logprobs": 5},
}
"""Loads by the name that ``--works`` takes: fields of `ServerLoad`."""

_START_SECONDS = 500.0
_OPTIONS = {"load_format": "dummy", "warmup": "on", "use_tqdm": False}


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's arguments."""
    p = command_parser("bench.server_share", __doc__)
    p.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b", help="of the model")
    p.add_argument(
        "--streams", type=whole(1), nargs="+", default=[1, 64, 256], metavar="N", help="at once"
    )
    p.add_argument("--works", nargs="+", choices=sorted(WORKS), default=list(WORKS))
    p.add_argument("--max-tokens", type=whole(2), default=128, metavar="N", help="of each stream")
    p.add_argument(
        "--clients", type=whole(1), default=6, metavar="N", help="processes that send the load"
    )
    p.add_argument("--quantization", metavar="NAME", help="of the weights, as rjax.LLM takes it")
    p.add_argument(
        "--engine",
        choices=("process", "thread"),
        default="process",
        help="where the server's engine runs (default: process, as in rjax serve)",
    )
    p.add_argument(
        "--warmup",
        choices=("on", "background"),
        default="on",
        help="of the server; in the background it compiles during the load, without a cache",
    )
    p.add_argument("--log", type=Path, metavar="FILE", help="of the server, for errors")
    p.add_argument("--name", default="server_share", help="of the result (default: server_share)")
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = build_parser().parse_args(argv)
    loads = [
        ServerLoad(streams=streams, max_tokens=arguments.max_tokens, **WORKS[work])
        for work in arguments.works
        for streams in arguments.streams
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_served_model(arguments.shapes, Path(folder))
        alone, ceilings = _in_own_process(folder, arguments)
        rows = [row for rows in alone.values() for row in rows]
        flags = _flags(arguments)
        if arguments.warmup == "background":
            flags += ["--compilation-cache-dir", str(Path(folder) / "compiled")]
        with fleet(folder, *flags, log=arguments.log, seconds=_START_SECONDS) as server:
            for load in tqdm(loads, desc="Loads over HTTP", disable=arguments.quiet):
                rows.append(_through_http(server, load, arguments.clients, alone[load.streams]))
    # Only now: to ask JAX for the device takes memory from the engines.
    found = record("bench.server_share", rows, vars(arguments), ceilings=ceilings)
    keep(found, COLUMNS, arguments.json, arguments.name)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    options = {**_OPTIONS, "max_num_seqs": max(arguments.streams)}
    options["max_model_len"] = -(-(SHARED + UNIQUE + arguments.max_tokens) // 1024) * 1024 + 1024
    if arguments.quantization is not None:
        options["quantization"] = arguments.quantization
    return options


def _flags(arguments: argparse.Namespace) -> list[str]:
    given = {**_options(arguments), "warmup": arguments.warmup}
    del given["use_tqdm"]
    flags = [word for k, v in given.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    flags += ["--served-model-name", ServerLoad(1).model]
    flags += ["--limit", "address_connections=4096", "--limit", "queued_sequences=4096"]
    flags += ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    return flags + ["--disable-frontend-multiprocessing"] * (arguments.engine == "thread")


# The engine in process


def _in_own_process(
    folder: str, arguments: argparse.Namespace
) -> tuple[dict[int, list[dict[str, Any]]], dict[str, float]]:
    """(rows of LLM and AsyncLLM by number of streams, ceilings of the device)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_engine, args=(folder, arguments, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError("the engine in process failed; what it printed says why") from None
    finally:
        process.join()


def _measure_engine(folder: str, arguments: argparse.Namespace, pipe: Any) -> None:
    from bench.ceilings import measure_ceilings
    from rjax import LLM, AsyncLLM
    from rjax.sampling import RequestOutputKind, SamplingParams

    ceilings = dataclasses.asdict(measure_ceilings())
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    rows = {}
    with LLM(folder, **_options(arguments)) as llm:
        for streams in arguments.streams:
            load = ServerLoad(streams, arguments.max_tokens)
            for seed in (1, 2):  # the first fills the prefix cache
                prompts = [{"prompt_token_ids": ids} for ids in load.prompts(seed)]
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
            rate = streams * arguments.max_tokens / seconds
            rows[streams] = [{"work": "LLM.generate", "streams": streams, "tokens_per_s": rate}]
        delta = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)

        async def one(served: AsyncLLM, prompt: list[int]) -> tuple[float, list[float]]:
            begin, times = time.perf_counter(), []
            async for output in served.generate({"prompt_token_ids": prompt}, delta):
                times += [time.perf_counter()] * bool(output.outputs[0].token_ids)
            return begin, times

        async def all_streams() -> None:
            async with AsyncLLM.from_engine(llm.engine) as served:
                for streams in arguments.streams:
                    load = ServerLoad(streams, arguments.max_tokens)
                    for seed in (3, 4):
                        asked = [one(served, ids) for ids in load.prompts(seed)]
                        found = await asyncio.gather(*asked)
                    span = max(t[-1] for _, t in found) - min(begin for begin, _ in found)
                    row = {"work": "AsyncLLM", "streams": streams, **latencies(found)}
                    row["tokens_per_s"] = streams * arguments.max_tokens / span
                    row["share"] = row["tokens_per_s"] / rows[streams][0]["tokens_per_s"]
                    rows[streams].append(row)

        asyncio.run(all_streams())
    pipe.send((rows, ceilings))


# The server


def _through_http(
    server: Fleet, load: ServerLoad, clients: int, alone: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A row; its shares are over those of ``alone``, rows of LLM and AsyncLLM."""
    url = urllib.parse.urlsplit(server.url)
    assert url.hostname is not None and url.port is not None
    spent: list[float] = []

    def clock() -> None:
        spent.append(_cpu_seconds(server.process.pid))

    found = measure_load(Address(url.hostname, url.port), load, clients, clock)
    before, after = spent
    of_llm, of_async = alone
    return {
        "work": load.name,
        "streams": load.streams,
        **found,
        "share": found["tokens_per_s"] / of_llm["tokens_per_s"],
        "ttft_share": found["ttft_ms_p99"] / of_async["ttft_ms_p99"],
        "gap_share": found["gap_ms_p99"] / of_async["gap_ms_p99"],
        "cores": (after - before) / found["seconds"],
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    run("bench.server_share", main)
