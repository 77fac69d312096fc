"""A fleet of replicas as a process, and clients with a few system prompts, for bench.replicas and
the tests of rjax.replicas."""

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2

from bench import ROOT

_URL = re.compile(r"\bon (http://\S+?)/v1")
_SAMPLE = re.compile(r'^(rjax:\w+)\{replica="(\w+)",[^}]*\} (\S+)$', re.MULTILINE)
_WORDS = (
    "river",
    "stone",
    "cloud",
    "amber",
    "maple",
    "north",
    "signal",
    "copper",
    "window",
    "garden",
)
TINY = (
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--max-model-len", "1024"),
    *("--num-pages", "40", "--warmup", "off"),
)
"""Options of replicas that fit a small machine."""


@dataclasses.dataclass
class Fleet:
    """A running server.

    Attributes:
        url: without a path.
        process: of the command.
    """

    url: str
    process: "subprocess.Popen[str]"

    def figures(self) -> dict[str, dict[str, float]]:
        """The replicas' metrics by tag and name."""
        text = httpx2.get(self.url + "/metrics", timeout=60).text
        found: dict[str, dict[str, float]] = {}
        for name, tag, value in _SAMPLE.findall(text):
            found.setdefault(tag, {})[name] = float(value)
        return found

    def replica_pids(self) -> list[int]:
        """Process ids of the replicas."""
        listed = subprocess.run(
            ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[1:]
        rows = [line.split(None, 2) for line in listed]
        parent = {int(pid): int(above) for pid, above, _ in rows}

        def is_ours(pid: int) -> bool:
            while pid > 1 and pid != self.process.pid:
                pid = parent.get(pid, 0)
            return pid == self.process.pid

        named = [int(pid) for pid, _, text in rows if text.startswith("ray::ServeReplica:rjax")]
        return sorted(pid for pid in named if is_ours(pid))


@contextlib.contextmanager
def fleet(
    *options: str, log: Path | None = None, seconds: float = 400.0, stop_seconds: float = 120.0
) -> Iterator[Fleet]:
    """``rjax serve`` with these options for the length of the block, on a free port.

    Args:
        options: of the command.
        log: file for its stderr; None discards it.
        seconds: for it to be ready.
        stop_seconds: for it to end after SIGTERM; then it is killed and the block fails.
    """
    command = [sys.executable, "-m", "rjax.serve", "--port", "0", *options]
    with (
        open(log or "/dev/null", "w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as process,
    ):
        try:
            yield Fleet(_ready(process, seconds), process)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(stop_seconds)
        finally:
            process.kill()


def _ready(process: "subprocess.Popen[str]", seconds: float) -> str:
    """The URL on the line that says that the server is ready."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < end:
            if ready.select(1.0):
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the server ended, status {process.wait()}; see its log")
                if found := _URL.search(line):
                    return found[1]
    raise TimeoutError(f"the server was not ready after {seconds:g} s; see its log")


def system_prompts(count: int, words: int = 130) -> list[str]:
    """Different long texts; the bundled model's tokenizer makes 3 to 4 tokens of a word."""
    draw = random.Random(7)
    return [" ".join([f"Rules {i}:", *draw.choices(_WORDS, k=words)]) for i in range(count)]


@dataclasses.dataclass
class Outcome:
    """What a client got.

    Attributes:
        prompt: number of its system prompt.
        start: when it asked, in seconds of the load.
        status: of HTTP; 0 if the connection broke.
        replica: tag of the replica that answered.
        text: pieces of the answer.
        error: message of an error, from the body or a stream's event.
        first_s, total_s: seconds to the first piece and to the end.
    """

    prompt: int
    start: float = 0.0
    status: int = 0
    replica: str = ""
    text: list[str] = dataclasses.field(default_factory=list)
    error: str = ""
    finished: bool = False
    first_s: float = 0.0
    total_s: float = 0.0


def body(system: str, number: int, max_tokens: int) -> dict[str, Any]:
    """A chat under a system prompt, greedy, of exactly ``max_tokens`` tokens."""
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {number}: what now?"},
        ],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def ask(
    client: httpx2.AsyncClient, url: str, content: dict[str, Any], found: Outcome
) -> Outcome:
    """One streamed chat; errors are part of the outcome."""
    begin = time.monotonic()
    try:
        async with client.stream("POST", url + "/v1/chat/completions", json=content) as answer:
            found.status = answer.status_code
            found.replica = answer.headers.get("x-replica", "")
            if answer.status_code != 200:
                found.error = (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.finished = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        found.error = event["error"]["message"]
                    elif piece := event["choices"][0]["delta"].get("content"):
                        found.first_s = found.first_s or time.monotonic() - begin
                        found.text.append(piece)
    except httpx2.HTTPError as error:
        found.error = repr(error)
    found.total_s = time.monotonic() - begin
    return found


async def load(
    url: str,
    systems: Sequence[str],
    *,
    clients: int,
    concurrency: int,
    max_tokens: int,
    seed: int = 0,
    during: Callable[[float, int], None] = lambda seconds, done: None,
    timeout: float = 240.0,
) -> list[Outcome]:
    """Clients that each ask once under one of the system prompts, in a shuffled order.

    Args:
        url: of the server.
        systems: the system prompts.
        clients: requests in all.
        concurrency: of them at once.
        max_tokens: of each answer.
        seed: of the order.
        during: called ten times a second with the seconds so far and the answers that ended.
        timeout: of a request.
    """
    order = [i % len(systems) for i in range(clients)]
    random.Random(seed).shuffle(order)
    start, done = time.monotonic(), 0
    slots = asyncio.Semaphore(concurrency)
    limits = httpx2.Limits(max_connections=concurrency)
    async with httpx2.AsyncClient(timeout=timeout, limits=limits) as client:

        async def one(number: int, prompt: int) -> Outcome:
            nonlocal done
            async with slots:
                found = Outcome(prompt, time.monotonic() - start)
                await ask(client, url, body(systems[prompt], number, max_tokens), found)
            done += 1
            return found

        async def watch() -> None:
            while True:
                during(time.monotonic() - start, done)
                await asyncio.sleep(0.1)

        watching = asyncio.ensure_future(watch())
        try:
            asked = [one(number, prompt) for number, prompt in enumerate(order)]
            return list(await asyncio.gather(*asked))
        finally:
            watching.cancel()


def homes(outcomes: Sequence[Outcome]) -> dict[int, Counter[str]]:
    """How many requests of each system prompt each replica answered."""
    found: dict[int, Counter[str]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.prompt, Counter())[outcome.replica] += 1
    return found
