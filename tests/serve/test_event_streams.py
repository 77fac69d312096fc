"""Event streams over a wire: when events are made, stored and written, and what errors do."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import pytest

from rjax.engine_channel.output_queue import OutputQueue
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind
from rjax.serve.api.output_events import OutputEncoder, OutputEvents
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.http.threads import WorkThreads
from rjax.serve.stores.event_log import EventLog, LoggedEvents


class FakeWire:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.is_paused = False
        self.written: list[bytes] = []
        self.pauses_at = 10**9
        self._resume: Callable[[], object] = lambda: None

    def on_resume(self, callback: Callable[[], object]) -> None:
        self._resume = callback

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.is_paused = len(self.written) >= self.pauses_at

    def resume(self) -> None:
        self.is_paused, self.pauses_at = False, 10**9
        self._resume()


class FakeEncoder(OutputEncoder):
    """Records what it is asked, and where."""

    def __init__(self, wire: FakeWire, *, large: bool, fails: int) -> None:
        self.steps: list[str] = []
        self.on_loop: list[bool] = []
        self.written_when_stored = -1
        self._wire = wire
        self._large = large
        self._fails = fails

    def begin(self) -> str:
        return "begin\n\n"

    def is_large(self, prompt: int, output: RequestOutput, *, last: bool) -> bool:
        return self._large and last

    def encode(self, prompt: int, output: RequestOutput, *, last: bool) -> list[str]:
        self._step("encode")
        if self._fails:
            raise ValueError("no event")
        name = output.outputs[0].text
        return [f"{name}\n\n", "last\n\n"] if last else [f"{name}\n\n"]

    @property
    def is_large_failure(self) -> bool:
        return self._large

    def fail(self, error: Exception) -> list[str]:
        self._step("fail")
        if self._fails == 2:
            raise RuntimeError("no event of the failure either")
        return [f"{error}\n\n"]

    def store(self) -> None:
        self._step("store")
        self.written_when_stored = len(self._wire.written)

    def _step(self, name: str) -> None:
        self.steps.append(name)
        self.on_loop.append(threading.current_thread() is threading.main_thread())


class Streaming:
    """A stream of outputs that a test gives it."""

    def __init__(self, *, large: bool = False, fails: int = 0) -> None:
        self.wire = FakeWire()
        self.encoder = FakeEncoder(self.wire, large=large, fails=fails)
        self.group = mock.NonCallableMock(RequestGroup, done=False)
        self.group.accept = self._accept
        self.group.new_queue.return_value = OutputQueue(RequestOutputKind.DELTA, 100)
        self._threads = WorkThreads(1)
        self.events = OutputEvents(self.group, self.encoder, self._threads)

    def _accept(self, output: RequestOutput) -> int:
        self.group.done = output.finished
        return 0

    def put(self, text: str, *, finished: bool = False) -> None:
        new = CompletionOutput(0, text, [1])
        self.events.put(RequestOutput("a", None, [1], outputs=[new], finished=finished))

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test while the events are written."""

        async def both() -> None:
            writing = asyncio.ensure_future(self.events.write_to(self.wire))
            await asyncio.sleep(0)
            await test()
            await asyncio.wait_for(writing, 60)

        try:
            asyncio.run(both())
        finally:
            self._threads.close()


@pytest.mark.parametrize("large", [False, True])
def test_a_response_is_stored_before_its_last_events_are_written(large):
    found = Streaming(large=large)

    async def test() -> None:
        assert found.wire.written == [b"begin\n\n"]
        found.put("a")
        assert found.wire.written == [b"begin\n\n", b"a\n\n"]
        found.put("b", finished=True)

    found.run(test)
    assert b"".join(found.wire.written) == b"begin\n\na\n\nb\n\nlast\n\n"
    assert found.encoder.steps == ["encode", "encode", "store"]
    assert found.encoder.on_loop == [True, not large, True]
    assert found.encoder.written_when_stored == 2


def test_large_events_wait_for_a_slow_client_after_the_response_is_stored():
    found = Streaming(large=True)
    found.wire.pauses_at = 2

    async def test() -> None:
        found.put("b", finished=True)
        while len(found.wire.written) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert found.wire.written[1:] == [b"b\n\n"]
        assert found.encoder.steps[-1] == "store"
        found.wire.resume()

    found.run(test)
    assert found.wire.written[1:] == [b"b\n\n", b"last\n\n"]


def test_outputs_of_a_slow_client_are_joined():
    found = Streaming()
    found.wire.pauses_at = 2

    async def test() -> None:
        for text in "abcd":
            found.put(text)
        assert found.wire.written == [b"begin\n\n", b"a\n\n"]
        found.wire.resume()
        found.put("e", finished=True)

    found.run(test)
    assert found.wire.written[2:] == [b"bcd\n\n", b"e\n\nlast\n\n"]


@pytest.mark.parametrize("large", [False, True])
def test_an_error_ends_a_stream_with_its_own_events(large):
    found = Streaming(large=large, fails=1)

    async def test() -> None:
        found.put("a", finished=True)

    found.run(test)
    assert found.wire.written == [b"begin\n\n", b"no event\n\n"]
    assert found.encoder.steps == ["encode", "fail", "store"]
    assert found.encoder.on_loop == [not large, not large, True]
    found.group.close.assert_called()


@pytest.mark.parametrize("large", [False, True])
def test_a_stream_without_events_of_its_error_is_broken_off(large):
    found = Streaming(large=large, fails=2)

    async def test() -> None:
        found.put("a", finished=True)

    with pytest.raises(RuntimeError, match="failure either"):
        found.run(test)
    assert found.wire.written == [b"begin\n\n"]
    found.group.close.assert_called()


def test_readers_of_a_log_get_its_events_from_any_number_on():
    async def run() -> None:
        sizes: list[int] = []
        log = EventLog(sizes.append)
        log.write(b"a\n\nb\n\n")
        wires = [FakeWire() for _ in range(4)]
        wires[1].pauses_at = 1
        reads = [
            asyncio.ensure_future(LoggedEvents(log, start).write_to(wire))
            for start, wire in zip((0, 0, 1, 7), wires, strict=True)
        ]
        await asyncio.sleep(0)
        log.write(b"c\n\n")
        assert wires[0].written == [b"a\n\n", b"b\n\n", b"c\n\n"]
        assert wires[1].written == [b"a\n\n"]  # it reads slowly
        assert wires[2].written == [b"b\n\n", b"c\n\n"]
        log.write(b"d\n\n" * 400)
        log.end()
        await asyncio.sleep(0)
        wires[1].resume()
        await asyncio.wait_for(asyncio.gather(*reads), 60)
        for start, wire in zip((0, 0, 1, 7), wires, strict=True):
            assert wire.written == log.events[start:]
        assert (sum(sizes), len(log.events)) == (log.size, 403)

    asyncio.run(run())


def test_a_long_log_leaves_the_loop_to_others_in_between():
    async def run() -> None:
        log, wire = EventLog(lambda size: None), FakeWire()
        log.write(b"a\n\n" * 1000)
        reading = asyncio.ensure_future(LoggedEvents(log, 0).write_to(wire))
        await asyncio.sleep(0)
        assert 0 < len(wire.written) < 1000
        log.end()
        await asyncio.wait_for(reading, 60)
        assert wire.written == log.events

    asyncio.run(run())


def test_a_reader_that_has_left_is_forgotten():
    async def run() -> None:
        log, wire = EventLog(lambda size: None), FakeWire()
        events = LoggedEvents(log, 0)
        reading = asyncio.ensure_future(events.write_to(wire))
        await asyncio.sleep(0)
        events.close()
        events.end()
        await reading
        log.write(b"a\n\n")
        assert wire.written == []
        assert not log._readers

    asyncio.run(run())
