"""Starts of the commands rjax.generate and rjax.serve, for bench.startup."""

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT

_URL = re.compile(r"\bon (http://\S+?:\d+)")
_POLL = 0.02  # seconds between two requests for /health
_STOP_SECONDS = 30.0
_SHOWN_LINES = 20  # of a server that did not start
_QUESTION = "Who lives in Peru?"


def start_generate(cache: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run ``python -m rjax.generate`` to its end; times in seconds.

    Raises:
        SystemExit: it failed.
    """
    start = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rjax.generate", "--json", "--no-progress"),
            *("--compilation-cache-dir", str(cache), *options),
        ],
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    total = time.monotonic() - start
    if done.returncode:
        raise SystemExit("rjax.generate failed; see above")
    stats = json.loads(done.stdout)["stats"]
    return {
        "total_s": total,
        **{f"{name}_s": value for name, value in stats["startup_phases"].items()},
        "prefix_s": stats["prefix_seconds"],
        "run_s": stats["seconds"],
        "compile_wait_s": stats["compile_wait_seconds"],
        "output_tokens": stats["output_tokens"],
        "output_per_s": stats["output_tokens_per_second"],
    }


def start_serve(cache: Path, options: Sequence[str], limit: float) -> dict[str, Any]:
    """Start ``python -m rjax.serve``, ask it for a completion, and stop it; times in seconds.

    Args:
        cache: compilation cache.
        options: further ones of the command.
        limit: seconds for the start.

    Raises:
        SystemExit: it did not start in this time.
    """
    start = time.monotonic()
    with _server(cache, options) as lines:
        url = _address(lines, start + limit)
        found = {"port_s": time.monotonic() - start}
        while not _healthy(url):
            if time.monotonic() - start > limit:
                raise SystemExit(f"rjax.serve was not healthy after {limit:g} s")
            time.sleep(_POLL)
        found["health_s"] = time.monotonic() - start
        for name in ("first_answer_s", "second_answer_s"):
            asked = time.monotonic()
            _complete(url)
            found[name] = time.monotonic() - asked
        found["total_s"] = found["health_s"] + found["first_answer_s"]
    return found


@contextlib.contextmanager
def _server(cache: Path, options: Sequence[str]) -> Iterator["queue.Queue[str | None]"]:
    """The lines that the server prints; None at their end. The server is stopped at the end."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rjax.serve", "--port", "0"),
            *("--compilation-cache-dir", str(cache), *options),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


def _address(lines: "queue.Queue[str | None]", deadline: float) -> str:
    """The address that the server prints as soon as its port is open."""
    seen: list[str] = []
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if line is None:
            break
        seen.append(line)
        if found := _URL.search(line):
            return found[1]
    raise SystemExit("rjax.serve did not start:\n" + "".join(seen[-_SHOWN_LINES:]))


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _complete(url: str) -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        model = json.loads(answer.read())["data"][0]["id"]
    body = {"model": model, "prompt": _QUESTION, "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
