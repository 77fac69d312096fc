"""How an engine process and its front end fail: killed, stopped, broken, refused."""

import asyncio
import contextlib
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rjax.api.async_engine import AsyncLLMEngine
from rjax.engine_channel.error_codec import EngineProcessError
from rjax.engine_channel.messages import Abort, MessageError, MessageReader, Reply, frame
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.errors import EngineDeadError, InvalidConfigError, OutOfMemoryError, OverloadedError
from rjax.models import CheckpointError
from tests.engine_streams import collect, tokens, until

from .conftest import FACTORY
from .stub_engine import CRASH_OF_STEP, NONSENSE

SOON = 40.0  # seconds; the promise is two, and the machine may be busy


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def opened(folder: Path, **arguments: Any) -> Iterator[ProcessChannel]:
    channel = ProcessChannel(FACTORY, {"folder": str(folder), **arguments})
    try:
        yield channel
    finally:
        channel.end()
        assert channel.join(SOON)


def run(channel: ProcessChannel, test: Any) -> None:
    async def whole() -> None:
        failed: list[Any] = []  # callbacks, of which the loop only logs
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failed.append(what))
        engine = AsyncLLMEngine(channel)
        await engine.start()
        await asyncio.wait_for(test(engine), 120)
        for _ in range(2):  # as a server that drains does
            await engine.stop()
            await asyncio.sleep(0.01)
        assert not failed

    asyncio.run(whole())


def break_off(channel: ProcessChannel, how: str) -> None:
    """Let the engine process end, or say what is no message."""
    if how == "kill":
        channel.process.kill()
        return
    data = {"huge": b"\xff" * 8, "garbage": struct.pack(">I", 3) + b"abc"}[how]
    channel._sock.send(data)


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("how", ["kill", "huge", "garbage", "step", "nonsense"])
def test_a_dead_engine_ends_its_streams(tmp_path, caplog, how):
    """Also one that fails in a step, and one that gets or sends what is no message."""
    caplog.set_level(logging.ERROR)
    with opened(tmp_path) as channel:
        channel.wait_ready()

        async def test(engine):
            readers = [asyncio.ensure_future(collect(engine, [1], tokens(10**9))) for _ in range(3)]
            await until(lambda: engine.num_live == 3)
            waiting = asyncio.ensure_future(engine.call_utility("stats"))
            await waiting
            start = time.monotonic()
            if how in ("step", "nonsense"):
                with contextlib.suppress(EngineDeadError):
                    first = CRASH_OF_STEP if how == "step" else NONSENSE
                    await engine.submit([first], tokens(5))
            else:
                break_off(channel, how)
            found = await asyncio.gather(*readers, return_exceptions=True)
            assert time.monotonic() - start < SOON
            assert [type(error) for error in found] == [EngineDeadError] * 3
            assert (engine.health, engine.failed) == ("dead", True)
            for call in (engine.call_utility("stats"), engine.submit([1], tokens(1))):
                with pytest.raises(EngineDeadError):
                    await call
            await until(lambda: "the engine process ended" in caplog.text)

        run(channel, test)
    killed = how in ("kill", "nonsense")
    assert channel.process.returncode == (-signal.SIGKILL if killed else 1)
    assert ("killed by SIGKILL" in caplog.text) == killed
    assert ("the engine process sent a message of" in caplog.text) == (how == "nonsense")


@pytest.mark.thorough
def test_stop_does_not_wait_for_a_step(tmp_path):
    with opened(tmp_path) as channel:
        channel.wait_ready()

        async def test(engine):
            reader = asyncio.ensure_future(collect(engine, [1], tokens(10**9)))
            await until(lambda: (tmp_path / "steps").exists())
            (tmp_path / "gate").touch()
            start = time.monotonic()
            await engine.stop()
            assert time.monotonic() - start < SOON
            with pytest.raises(OverloadedError):
                await reader
            assert not engine.failed
            assert engine.health == "dead"

        run(channel, test)
    assert channel.process.returncode == 0


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
    ("start", "error", "said"),
    [
        ("config", InvalidConfigError, "page_size is 3; choose another"),
        ("memory", OutOfMemoryError, "the weights do not fit"),
        ("checkpoint", CheckpointError, "no config.json in a"),
        ("file", OSError, "No such file or directory: '/nowhere'"),
        ("crash", EngineProcessError, "ZeroDivisionError: at the start"),
        ("nonsense", EngineDeadError, "sent a message of"),
    ],
)
def test_an_engine_that_cannot_be_built(tmp_path, start, error, said, capfd):
    with opened(tmp_path, start=start) as channel, pytest.raises(error, match=said):
        channel.wait_ready()
    assert ("Traceback" in capfd.readouterr().err) == (start == "crash")
    assert channel.process.returncode == (-signal.SIGKILL if start == "nonsense" else 1)


@pytest.mark.thorough
def test_a_process_that_is_killed_while_it_starts(tmp_path):
    with opened(tmp_path, start="slow") as channel:
        wait_for(lambda: (tmp_path / "loading").exists())
        channel.process.kill()
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            channel.wait_ready()


@pytest.mark.thorough
def test_progress_is_known_before_the_engine_serves(tmp_path):
    prepare = FACTORY.replace("make", "prepare")
    channel = ProcessChannel(FACTORY, {"folder": str(tmp_path)}, prepare=prepare)
    waiting = threading.Thread(target=channel.wait_ready)
    waiting.start()
    assert not channel.is_built
    wait_for(lambda: channel.is_built)
    assert channel.compile_progress().total == 20
    assert waiting.is_alive()
    (tmp_path / "prepared").touch()
    waiting.join(SOON)
    assert channel.facts.summary == {"model": "stub", "dtype": "bfloat16"}
    channel.end()
    assert channel.join(SOON)


@pytest.mark.thorough
def test_signals_are_for_the_front_end(process_side):
    process = process_side.channel.process
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    assert os.getpgid(process.pid) != os.getpgid(0)


@contextlib.contextmanager
def front_end(folder: Path, start: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A front end in a process, and the process id of its engine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine_channel.front_end", str(folder), start],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("when", ["loading", "streaming", "in a step"])
def test_the_engine_ends_with_its_front_end(tmp_path, when):
    with front_end(tmp_path, "slow" if when == "loading" else "") as (process, engine):
        if when == "loading":
            wait_for(lambda: (tmp_path / "loading").exists())
        else:
            wait_for(lambda: (tmp_path / "steps").exists())
        if when == "in a step":
            (tmp_path / "gate").touch()
            time.sleep(0.1)
        assert alive(engine)
        process.kill()
        wait_for(lambda: not alive(engine), SOON)


@pytest.mark.thorough
def test_a_stopped_front_end_stops_no_step(tmp_path):
    """It then gets every token, in few outputs."""

    def steps() -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((tmp_path / "steps").read_text())
        return 0

    with front_end(tmp_path) as (process, engine):
        wait_for(lambda: steps() > 0)
        process.send_signal(signal.SIGSTOP)
        before = steps()
        # Far more than the socket holds: each of these steps has four outputs of about 40 bytes.
        wait_for(lambda: steps() > before + 4_000)
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=120)
        assert said.split("\n").count("whole") == 4
        wait_for(lambda: not alive(engine), SOON)


def test_messages_in_parts():
    reader = MessageReader.of_commands()
    data = frame(Abort(["a"])) + frame(Abort(["b", "c"]))
    found = [message for i in range(len(data)) for message in reader.feed(data[i : i + 1])]
    assert found == [Abort(["a"]), Abort(["b", "c"])]
    assert list(reader.feed(data[:5])) == []
    with pytest.raises(MessageError, match="malformed"):
        list(MessageReader.of_commands().feed(frame(Reply(1))))
