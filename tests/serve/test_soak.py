"""Every attack at random beside honest clients; afterwards all is where it began.

``--soak-seconds``, ``--soak-seed`` and ``--soak-attacks`` say how long and which.
"""

import gc
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from rjax.serve.config.limits import ServeLimits
from rjax.serve.workers.memory import TRIM_SECONDS, keep_trimmed, share_arenas

from .attacks import ATTACKS, attack
from .hostile import KEPT_BYTES, LoopWatch, ask, memory, open_files, until, watched
from .live_server import LiveServer, live_server, make_engine

HONEST, ATTACKERS = 16, 6
WARM_SECONDS = 120.0  # of attacks before the memory counts: caches fill, allocators grow
ROUND_SECONDS = 300.0  # of attacks, between looks at what they left
SLOWEST_HEALTH = 3.0
LOOP_SECONDS = 1.0  # several requests at once, whose every annotation is checked
CLOSED = (ConnectionResetError, BrokenPipeError)  # while an answer is read, or a request is sent
LOST_SECONDS = 300.0  # an answer that has not come by then will not come
POOLS = ("rjax-serve", "rjax-masks", "AnyIO", "asyncio_")  # of threads that come and go with use
POOL_THREADS = 64  # of all these pools together


def probes(draw: random.Random) -> list[dict[str, Any]]:
    """What the honest clients ask, greedily."""
    return [
        {
            "prompt": [draw.randrange(10, 200) for _ in range(draw.choice([3, 40, 200]))],
            "max_tokens": draw.choice([1, 12, 30]),
            "temperature": 0,
            **draw.choice([{}, {"n": 1, "logprobs": 2}, {"cache_salt": "own"}]),
        }
        for _ in range(HONEST)
    ]


def text(server: LiveServer, body: dict[str, Any]) -> str | None:
    """The answer's text; None where the server asks for another try."""
    found = ask(server, "POST", "/v1/completions", body, seconds=LOST_SECONDS)
    if found.status == 503:
        return None
    assert found.status == 200, found.body[:500]
    return found.json["choices"][0]["text"]


@pytest.mark.slow
def test_every_attack_at_random_beside_honest_clients(folder, request):
    seconds = request.config.getoption("--soak-seconds")
    seed = request.config.getoption("--soak-seed")
    names = request.config.getoption("--soak-attacks")
    chosen = [a for a in ATTACKS if not names or a.__name__ in names.split(",")]
    share_arenas()
    keep_trimmed()
    draw = random.Random(seed)
    limits = ServeLimits(
        send_seconds=3.0, header_seconds=2.0, body_seconds=3.0, open_connections=400,
        address_connections=200, connections=200, keep_alive_seconds=2, queued_sequences=160,
    )  # fmt: skip
    with live_server(make_engine(folder), limits=limits, send_buffer=8192) as server:
        asked = probes(draw)
        alone = [text(server, body) for body in asked]
        stop, answers, waits, answered = threading.Event(), Counter[int](), [0.0], [0.0]
        errors: list[BaseException] = []
        resets: list[int] = []  # by whom: a client that waited too long for a turn of this process
        done: Counter[str] = Counter()

        def honest(i: int) -> None:
            try:
                while not stop.is_set():
                    start = time.monotonic()
                    try:
                        found = text(server, asked[i])
                    except CLOSED:
                        resets.append(i)
                        continue
                    answered.append(time.monotonic() - start)
                    if found is None:
                        time.sleep(0.2)
                        continue
                    assert found == alone[i]
                    answers[i] += 1
            except BaseException as error:
                errors.append(error)

        def hostile(i: int) -> None:
            own = random.Random(f"{seed} {i}")
            try:
                while not stop.is_set():
                    one = own.choice(chosen)
                    attack(one, server, own)
                    done[one.__name__] += 1
            except BaseException as error:
                errors.append(error)

        def health() -> None:
            try:
                while not stop.is_set():
                    start = time.monotonic()
                    try:
                        assert ask(server, "GET", "/health").json["status"] == "ready"
                    except CLOSED:
                        resets.append(-1)
                        continue
                    waits.append(time.monotonic() - start)
                    time.sleep(0.2)
            except BaseException as error:
                errors.append(error)

        def settled() -> tuple[int, int, int]:
            """Threads, files and memory once everything has ended."""
            for card in ask(server, "GET", "/v1/prefixes").json["data"]:
                ask(server, "DELETE", f"/v1/prefixes/{card['name']}")
            server.wait_idle(120)
            until(lambda: len(server.server._open) == 0, 30)
            assert server.used_bytes() == 0
            engine = server.service.engine
            queue = engine._queue
            assert not (queue.sequences or queue.prompt_tokens or engine.num_live)
            gc.collect()
            time.sleep(TRIM_SECONDS + 1)
            names = [thread.name for thread in threading.enumerate()]
            pools = [name for name in names if name.startswith(POOLS)]
            assert len(pools) <= POOL_THREADS
            pools_of_workers = (server.service.texts, server.service.compilers)
            workers = sum(len(pool._idle) for pool in pools_of_workers)  # kept for the next task
            return len(names) - len(pools), open_files() - workers, memory()

        def attacked(seconds: float) -> LoopWatch:
            stop.clear()
            threads = [
                *(threading.Thread(target=honest, args=(i,)) for i in range(HONEST)),
                *(threading.Thread(target=hostile, args=(i,)) for i in range(ATTACKERS)),
                threading.Thread(target=health),
            ]
            with watched(server, float("inf"), kept=float("inf")) as watch:
                for thread in threads:
                    thread.start()
                end = time.monotonic() + seconds
                while time.monotonic() < end and not errors:
                    time.sleep(0.5)
                stop.set()
                for thread in threads:
                    thread.join(LOST_SECONDS)
                    assert not thread.is_alive()
            if errors:
                raise errors[0]
            return watch

        attacked(min(WARM_SECONDS, seconds / 4))
        threads, files, kept = now = settled()
        waits[:] = [0.0]
        print(f"\nafter the warm-up: memory {kept / 1e6:.0f} MB")
        rounds, longest = max(1, round(seconds / ROUND_SECONDS)), 0.0
        for number in range(rounds):
            longest = max(longest, attacked(seconds / rounds).longest)
            now = settled()
            print(f"\n{(number + 1) * seconds / rounds:g} s: memory {now[2] / 1e6:.0f} MB")
        print(
            f"seed {seed}: attacks {dict(done)}; {sum(answers.values())} "
            f"honest answers, the slowest after {max(answered):.0f} s; health within "
            f"{max(waits):.2f} s; {len(resets)} resets; loop {longest:.2f} s; "
            f"threads {threads} to {now[0]}, files {files} to {now[1]}, "
            f"memory {kept / 1e6:.0f} to {now[2] / 1e6:.0f} MB"
        )
        assert min(answers[i] for i in range(HONEST)) > 0
        assert max(waits) < SLOWEST_HEALTH
        assert len(resets) <= (sum(answers.values()) + len(waits)) / 100
        assert longest < LOOP_SECONDS
        assert now[0] <= threads
        assert now[1] <= files
        assert now[2] < kept + KEPT_BYTES
        assert [text(server, body) for body in asked] == alone
        assert len(done) == len(chosen) or seconds < 60
