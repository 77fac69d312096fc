"""Many requests that arrive together: when each reaches the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from rjax.sampling import SamplingParams
from rjax.serve.api.request_group import RequestGroup
from rjax.serve.api.service import Service
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.loop_turns import LoopTurns


def test_a_request_is_with_the_engine_before_its_handler_first_waits():
    """So the engine starts with the first of many requests while the others are being parsed."""
    submitted = []

    class Engine:
        limits = SimpleNamespace(unread_tokens=100)

        def check_capacity(self, sequences: int, tokens: int, tenant: str) -> None:
            pass

        async def submit(self, tokens: list[int], params: SamplingParams, **options: Any) -> Any:
            submitted.append(tokens)
            await asyncio.sleep(0)
            return SimpleNamespace(request_id=str(tokens), finished=True, close=lambda: None)

    async def run() -> None:
        service = mock.NonCallableMock(Service, engine=Engine(), limits=ServeLimits())
        group = RequestGroup(service, SamplingParams())
        starting = group.start([("a", [1]), ("b", [2])], None, tenant="somebody")
        waits_for = starting.send(None)
        assert submitted == [[1], [2]]
        await asyncio.wait([waits_for])
        with pytest.raises(StopIteration):
            starting.send(None)

    asyncio.run(run())


def test_a_burst_passes_in_turns_of_the_event_loop_and_in_order():
    async def run() -> None:
        turns, passed = LoopTurns(3), []

        async def ask(i: int) -> None:
            await turns.enter()
            passed.append(i)

        asked = [asyncio.ensure_future(ask(i)) for i in range(10)]
        asked[4].cancel()
        most = 0
        while not all(task.done() for task in asked):
            before = len(passed)
            await asyncio.sleep(0)
            most = max(most, len(passed) - before)
        assert passed == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert most == 3
        await asyncio.sleep(0)
        await asyncio.wait_for(turns.enter(), 1)  # none is left out after a burst

    asyncio.run(run())
