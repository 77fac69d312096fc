"""Channels to the stub engine: one on a thread, one in a process."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from rjax.api.async_engine import AsyncLLMEngine, QueueLimits
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.engine_channel.thread_channel import ThreadChannel

from .stub_engine import StubEngine

FACTORY = "tests.engine_channel.stub_engine:make"


@dataclasses.dataclass
class Side:
    """A channel, and the folder by which its engine is controlled."""

    channel: EngineChannel
    folder: Path
    process: bool

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def set(self, name: str, *, on: bool) -> None:
        """Close or open the gate of the steps, or that of the masks of the source "slow", or say
        that a step compiles."""
        if on:
            (self.folder / name).touch()
        else:
            (self.folder / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def process_side(tmp_path_factory) -> Iterator[Side]:
    """One process for many tests, since it takes seconds to start."""
    folder = tmp_path_factory.mktemp("stub")
    channel = ProcessChannel(FACTORY, {"folder": str(folder)})
    channel.wait_ready()
    yield Side(channel, folder, True)
    channel.end()
    assert channel.join(60)


@pytest.fixture(params=["thread", "process"])
def side(request, tmp_path) -> Iterator[Side]:
    """Each kind of channel."""
    if request.param == "thread":
        found = Side(ThreadChannel(StubEngine(str(tmp_path))), tmp_path, False)
        yield found
        for name in ("gate", "mask_gate"):
            found.set(name, on=False)
        found.channel.end()
        assert found.channel.join(60)
        return
    found = request.getfixturevalue("process_side")
    (found.folder / "log").unlink(missing_ok=True)
    yield found
    for name in ("gate", "compiling", "mask_gate"):
        found.set(name, on=False)
    found.channel._loop = None  # the next test has another event loop
    found.channel._sock.setblocking(True)


type Test = Callable[[AsyncLLMEngine], Coroutine[Any, Any, None]]


def drive(side: Side, test: Test, **limits: Any) -> None:
    """Run a test on a started engine; the channel stays open."""

    async def whole() -> None:
        engine = AsyncLLMEngine(side.channel, QueueLimits(**limits))
        await engine.start()
        await asyncio.wait_for(test(engine), 120)

    asyncio.run(whole())
