"""New weights for an engine on a thread, and for one in another process, through shared memory."""

import asyncio
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rjax.engine_channel import weight_file
from rjax.engine_channel.weight_file import WeightFile, read_weight_file
from rjax.errors import InvalidWeightsError
from tests.engine_streams import until

from .conftest import Side, drive

ARRAYS = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "small": np.ones((3, 5), ml_dtypes.bfloat16),
    "eight": np.full(4, 2, ml_dtypes.float8_e4m3fn),
    "scalar": np.asarray(np.float16(3)),
    "empty": np.zeros((0, 4), np.int32),
}


@pytest.mark.parametrize("mapped", [0, 1 << 20])
def test_a_file_holds_arrays_of_any_type_and_leaves_nothing(mapped, monkeypatch):
    monkeypatch.setattr(weight_file, "_MAPPED_BYTES", mapped)
    before = set(os.listdir("/proc/self/fd"))
    file = WeightFile(ARRAYS.items())
    found = dict(read_weight_file(file.path))
    file.close()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
        assert not found[name].flags.writeable
    with pytest.raises(OSError, match="No such file"):
        read_weight_file(file.path)
    del found
    assert set(os.listdir("/proc/self/fd")) <= before


def test_parts_arrive_as_they_are(side: Side):
    async def test(engine):
        weights, tree = engine.weights, {"a": {"b": [jnp.ones(3), jnp.zeros((2, 2))]}}
        version = weights.version
        await weights.start(partial=True, mapping="tunix")
        await weights.add(ARRAYS.items())
        await weights.add(tree)
        assert await weights.finish("keep") == version + 1 == weights.version
        log = [
            "start True tunix",
            "matrix float32 (2, 3) 15",
            "turned float64 (3, 2) 15",
            "small bfloat16 (3, 5) 15",
            "eight float8_e4m3fn (4,) 8",
            "scalar float16 () 3",
            "empty int32 (0, 4) 0",
            "a.b.0 float32 (3,) 3",
            "a.b.1 float32 (2, 2) 0",
            "finish keep",
        ]
        assert side.log() == log
        await weights.update(tree, mapping="maxtext")
        assert side.log()[len(log) :].count("finish wait") in (1, 2, 3)

    drive(side, test)


def test_a_table_is_applied_where_it_is(side: Side):
    async def test(engine):
        table = {"x": ("y.*", "L D F -> F D")}
        weights = engine.weights
        await weights.update({"x": np.ones((2, 3, 4), np.float32)}, mapping=table, mode="keep")
        tensors = [line for line in side.log() if " float32 " in line]
        if side.process:  # which cannot get a function
            assert tensors == ["y.0 float32 (4, 3) 12", "y.1 float32 (4, 3) 12"]
            assert "start False False" in side.log()
        else:
            assert tensors == ["x float32 (2, 3, 4) 24"]
        await weights.start(mapping=table)
        if side.process:
            with pytest.raises(InvalidWeightsError, match="z is in no entry of the mapping"):
                await weights.add({"z": np.ones(1)})
            assert side.log()[-1] == "cancel"

    drive(side, test)


def test_errors_and_cancelled_waits_cancel_the_update(side: Side):
    async def test(engine):
        weights = engine.weights
        with pytest.raises(InvalidWeightsError, match="bad is no tensor"):
            await weights.update({"bad": np.ones(1)})
        assert side.log()[-1] == "cancel"
        with pytest.raises(InvalidWeightsError, match="give a NumPy or JAX array"):
            await weights.update({"word": "array"}) if side.process else refuse()
        await weights.start()
        while True:  # the stub says "wait" twice of three times
            task = asyncio.create_task(weights.finish("wait"))
            count = len(side.log())
            await until(lambda before=count: len(side.log()) > before)
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            if isinstance(done[0], asyncio.CancelledError):
                break
        assert side.log()[-1] == "cancel"

    def refuse():
        raise InvalidWeightsError("give a NumPy or JAX array")  # the engine's own check

    drive(side, test)
