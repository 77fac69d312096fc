"""Every attack of the soak: each ends by itself, whatever the server answers."""

import contextlib
import http.client
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from .hostile import ELSEWHERE, ask, connect, raw_post
from .live_server import LiveServer

type Attack = Callable[[LiveServer, random.Random], None]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def huge_prompt(server: LiveServer, draw: random.Random) -> None:
    """A prompt array of many entries, of one type or of several."""
    count = draw.choice([10**3, 10**5, 10**6])
    kinds: list[Any] = [1, "a", [1], ["a"], None, 1.5, {}, True]
    entries = draw.sample(kinds, draw.choice([1, 1, 2, len(kinds)]))
    prompt = [entries[i % len(entries)] for i in range(count)]
    ask(server, "POST", COMPLETIONS, {"prompt": prompt, "max_tokens": 1}, source=ELSEWHERE)


def empty_messages(server: LiveServer, draw: random.Random) -> None:
    """Messages that are none, as many as a body holds."""
    message = draw.choice([{}, {"role": "x"}, {"role": "user", "content": 5}, [], None])
    body = {"messages": [message] * draw.choice([1, 1000, 300_000]), "max_tokens": 1}
    ask(server, "POST", CHAT, body, source=ELSEWHERE)


def pattern_properties(server: LiveServer, draw: random.Random) -> None:
    """A schema of many regexes that backtrack."""
    count = draw.choice([20, 200, 2000])
    name = draw.randrange(10**6)
    patterns = {f"^(a|b)*{name}_{i}$": {"type": "integer"} for i in range(count)}
    schema = {"type": "object", "patternProperties": patterns}
    body = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"json": schema}}
    ask(server, "POST", COMPLETIONS, body, source=ELSEWHERE)


def huge_tools(server: LiveServer, draw: random.Random) -> None:
    """Functions with descriptions that no prompt has room for."""
    size = draw.choice([10**3, 10**5, 10**6])
    function = {"name": "f", "description": "look it up " * (size // 11)}
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "tools": [{"type": "function", "function": function}],
    }
    ask(server, "POST", CHAT, body, source=ELSEWHERE)


def huge_answer(server: LiveServer, draw: random.Random) -> None:
    """Alternatives to every token of many long prompts, read or not."""
    prompts = [[draw.randrange(10, 200)] * 400 for _ in range(draw.choice([1, 8]))]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20}
    if draw.random() < 0.5:
        ask(server, "POST", COMPLETIONS, body, source=ELSEWHERE)
    else:
        with connect(server, ELSEWHERE, receive_buffer=4096) as link:
            link.sendall(raw_post(COMPLETIONS, body))
            time.sleep(draw.random() * 8)


def prefixes(server: LiveServer, draw: random.Random) -> None:
    """Prefixes under any name, awaited or not, pinned or not, used, and dropped."""
    name = f"p{draw.randrange(100)}"
    body = {
        "name": name,
        "prompt": [draw.randrange(10, 200)] * draw.randint(1, 400),
        "pin": draw.random() < 0.7,
    }
    if draw.random() < 0.4:
        with connect(server, ELSEWHERE) as link:
            link.sendall(raw_post("/v1/prefixes", body))
            time.sleep(draw.random() * 0.3)
    else:
        ask(server, "POST", "/v1/prefixes", body, source=ELSEWHERE)
    use = {"prompt": "a", "max_tokens": 2, "prefix": name}
    ask(server, "POST", COMPLETIONS, use, source=ELSEWHERE)
    if draw.random() < 0.5:
        pin = {"pin": draw.random() < 0.5}
        ask(server, "PATCH", f"/v1/prefixes/{name}", pin, source=ELSEWHERE)
    if draw.random() < 0.8:
        ask(server, "DELETE", f"/v1/prefixes/{name}", source=ELSEWHERE)


def never_reads(server: LiveServer, draw: random.Random) -> None:
    """A stream of many sequences whose client does nothing, or reads a little."""
    body = {
        "prompt": ["a"] * draw.choice([16, 64, 128]),
        "max_tokens": draw.choice([5, 30]),
        "stream": True,
        "ignore_eos": True,
        "logprobs": draw.choice([None, 20]),
    }
    with connect(server, ELSEWHERE, receive_buffer=4096) as link:
        link.sendall(raw_post(COMPLETIONS, body))
        end = time.monotonic() + draw.random() * 10
        link.settimeout(1)
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                if draw.random() < 0.3 and not link.recv(200):
                    return
            time.sleep(0.5)


def silent(server: LiveServer, draw: random.Random) -> None:
    """Connections on which nothing comes, or part of a request."""
    part = draw.choice(
        [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\n", raw_post(COMPLETIONS, {})[:-1]]
    )
    with contextlib.ExitStack() as stack:
        for i in range(draw.choice([10, 100, 300])):
            link = stack.enter_context(connect(server, f"127.0.3.{i % 250 + 1}"))
            with contextlib.suppress(ConnectionError):
                link.sendall(part)
        time.sleep(draw.random() * 3)


def slow_headers(server: LiveServer, draw: random.Random) -> None:
    """A byte now and then."""
    with connect(server, ELSEWHERE) as link:
        for byte in b"POST /v1/completions HTTP/1.1\r\n" + b"X-A: b\r\n" * 100:
            link.sendall(bytes([byte]))
            time.sleep(0.1)
            if draw.random() < 0.01:
                return


def pipelined(server: LiveServer, draw: random.Random) -> None:
    """Many requests at once on one connection, none of whose answers is read."""
    request = draw.choice(
        [b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", raw_post(COMPLETIONS, {})]
    )
    with connect(server, ELSEWHERE, receive_buffer=4096) as link:
        link.settimeout(3)
        link.sendall(request * draw.choice([10, 3000]))
        time.sleep(draw.random() * 3)


def vanishing(server: LiveServer, draw: random.Random) -> None:
    """A long request whose client is gone, by a reset or not."""
    body = {"prompt": ["a"] * draw.randint(1, 30), "max_tokens": 60, "ignore_eos": True}
    with connect(server, ELSEWHERE) as link:
        link.sendall(raw_post(COMPLETIONS, body | {"stream": draw.random() < 0.5}))
        time.sleep(draw.random())
        if draw.random() < 0.5:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def most_ends(server: LiveServer, draw: random.Random) -> None:
    """As many ids as may end a sequence."""
    body = {
        "prompt": "a",
        "max_tokens": 3,
        "min_tokens": 2,
        "stop_token_ids": draw.sample(range(10, 200), 64),
    }
    ask(server, "POST", COMPLETIONS, body, source=ELSEWHERE)


ATTACKS: tuple[Attack, ...] = (
    huge_prompt,
    empty_messages,
    pattern_properties,
    huge_tools,
    huge_answer,
    prefixes,
    never_reads,
    silent,
    slow_headers,
    pipelined,
    vanishing,
    most_ends,
)


def attack(chosen: Attack, server: LiveServer, draw: random.Random) -> None:
    """One attack. A connection that the server cuts is no error."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        chosen(server, draw)
