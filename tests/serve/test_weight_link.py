"""Weights that come from a trainer's process: what is received, and what is refused."""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rjax.errors import InvalidRequestError
from rjax.serve.api.trainers.weight_link import BUCKET, TensorSpec, WeightLink, socket_path
from rjax.serve.api.trainers.weight_updates import WeightUpdates, specs_of
from rjax.serve.protocol.errors import ApiError

from .weight_sender import SEALS, WeightSender

PORT = 20_000 + os.getpid() % 40_000
ARRAYS = {
    "a.weight": np.arange(35, dtype=np.float32).reshape(5, 7),
    "a.bias": np.zeros((0, 3), np.float16),
    "b.weight": np.linspace(-2, 2, 300).astype(ml_dtypes.bfloat16).reshape(3, 1, 100),
    "scalar": np.array(7, np.int8),
}


def specs(*names: str) -> list[TensorSpec]:
    wanted = [(name, ARRAYS[name]) for name in names or ARRAYS]
    return [TensorSpec.read(name, f"torch.{a.dtype.name}", a.shape) for name, a in wanted]


class FakeEngine:
    """Records an update; refuses tensors whose name is "bad"."""

    def __init__(self) -> None:
        self.weights: dict[str, np.ndarray] = {}
        self.staged: dict[str, np.ndarray] | None = None
        self.log: list[str] = []

    async def start(self, *, partial: bool = False, mapping: str | None = None) -> None:
        assert self.staged is None
        self.staged = {}
        self.log.append(f"start {partial} {mapping}")

    async def add(self, items: Iterable[tuple[str, np.ndarray]]) -> None:
        assert self.staged is not None
        if any(name == "bad" for name, _ in items):
            raise ValueError("there is no parameter 'bad'")
        self.staged |= dict(items)

    async def finish(self, mode: str = "wait") -> int:
        assert self.staged is not None
        self.weights, self.staged = self.staged, None
        self.log.append(f"finish {mode}")
        return 1

    async def cancel(self) -> None:
        self.staged = None
        self.log.append("cancel")


def runs[**P](test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@contextlib.asynccontextmanager
async def paired() -> AsyncGenerator[tuple[WeightUpdates, FakeEngine, WeightSender]]:
    """A server's updates and the trainer to which they are connected."""
    engine = FakeEngine()
    updates = WeightUpdates(engine)
    with WeightSender(PORT) as sender:
        connecting = asyncio.create_task(updates.connect(PORT))
        await asyncio.to_thread(sender.accept)
        await connecting
        yield updates, engine, sender
        await updates.close()


@runs
async def test_tensors_arrive_in_buckets_as_they_were_sent():
    async with paired() as (updates, engine, sender):
        first, second = list(ARRAYS.values())[:3], list(ARRAYS.values())[3:]
        for number in range(2):
            await updates.start()
            receiving = asyncio.create_task(updates.receive(specs()))
            for bucket in (first, second):
                sender.send(bucket)
                assert await asyncio.to_thread(sender.answer) == ""
            await receiving
            assert bool(engine.weights) == bool(number)
            assert await updates.finish("abort") == 1
            assert engine.log[-1] == "finish abort"
            for name, array in ARRAYS.items():
                assert engine.weights[name].dtype == array.dtype
                np.testing.assert_array_equal(engine.weights[name], array, strict=True)
                assert not engine.weights[name].flags.writeable or not array.size
        with pytest.raises(ApiError, match="no update has started"):
            await updates.finish("wait")


LYING = {
    "too many tensors": (BUCKET.pack(5, 768), bytes(768), SEALS, "5 tensors; 4"),
    "no tensors": (BUCKET.pack(0, 0), b"", SEALS, "0 tensors"),
    "other bytes": (BUCKET.pack(1, 128), bytes(128), SEALS, "128 bytes; its 1"),
    "a short file": (BUCKET.pack(1, 256), bytes(100), SEALS, "shorter"),
    "an open file": (BUCKET.pack(1, 256), bytes(256), 0, "seal the memfd"),
    "a message that is none": (b"weights", bytes(256), SEALS, "not a bucket"),
}


@pytest.mark.parametrize("lie", LYING)
@runs
async def test_a_lying_trainer_changes_nothing(lie):
    async with paired() as (updates, engine, sender):
        message, data, seals, error = LYING[lie]
        await updates.start()
        sender.send_raw(message, data, seals)
        with pytest.raises(InvalidRequestError, match=error):
            await updates.receive(specs())
        assert error in sender.answer()
        assert (engine.weights, engine.staged) == ({}, None)
        with pytest.raises(ApiError, match="no trainer is connected"):
            await updates.receive(specs())


@runs
async def test_a_killed_trainer_changes_nothing():
    async with paired() as (updates, engine, sender):
        await updates.start(partial=True, mapping="tunix")
        receiving = asyncio.create_task(updates.receive(specs()))
        sender.send(list(ARRAYS.values())[:1])
        await asyncio.to_thread(sender.answer)
        sender.close()
        with pytest.raises(InvalidRequestError, match="before 3 of its tensors"):
            await receiving
        assert engine.log == ["start True tunix", "cancel"]
        assert (engine.weights, engine.staged) == ({}, None)


@pytest.mark.parametrize("sent_before", [True, False])
@runs
async def test_a_trainer_learns_what_the_engine_refuses(sent_before):
    for started, error in ((False, "no update has started"), (True, "no parameter 'bad'")):
        async with paired() as (updates, engine, sender):
            if started:
                await updates.start()
            if sent_before or started:
                sender.send([np.zeros(3, np.float32)])
            with pytest.raises((ApiError, ValueError), match=error):
                await updates.receive(specs_of(["bad"], ["float32"], [[3]]))
            if not (sent_before or started):
                sender.send([np.zeros(3, np.float32)])
            assert error in sender.answer()
            assert engine.staged is None


@runs
async def test_a_cancel_ends_what_waits_for_a_trainer():
    async with paired() as (updates, engine, _):
        await updates.start()
        receiving = asyncio.create_task(updates.receive(specs()))
        await asyncio.sleep(0.05)
        await updates.cancel()
        with pytest.raises(InvalidRequestError):
            await receiving
        assert engine.staged is None and not updates.is_open


@runs
async def test_a_new_update_takes_the_place_of_an_unfinished_one():
    async with paired() as (updates, engine, _):
        await updates.start()
        await updates.start()
        assert engine.log == ["start False None", "cancel", "start False None"]


def test_a_socket_of_nobody_and_a_file_are_no_trainers(tmp_path, monkeypatch):
    with pytest.raises(InvalidRequestError, match="no trainer listens"):
        WeightLink.connect(PORT, 0.05)
    path = socket_path(PORT)
    path.write_text("")
    try:
        with pytest.raises(InvalidRequestError, match="no socket of the user"):
            WeightLink.connect(PORT, 0.05)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "error"),
    [
        (["a"], ["float32"], [], "1 names, 1 dtype_names and 0 shapes"),
        (["a"], ["object"], [[1]], "has the dtype 'object'"),
        (["a"], ["float32"], [[-1]], "no shape"),
    ],
)
def test_announcements_are_checked(names, dtypes, shapes, error):
    with pytest.raises(InvalidRequestError, match=error):
        specs_of(names, dtypes, shapes)


def test_a_connection_that_is_no_trainers_ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = WeightLink(ours, seconds=0.05)
    with pytest.raises(InvalidRequestError, match="sends no weights"):
        link.receive(specs())
    link.close()
    theirs.close()
