"""Loading on several threads: values, bounds of memory, and what an error or Ctrl-C leaves."""

import gc
import math
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rjax import models
from rjax.models.decoder import Decoder
from rjax.models.loading import assembly, pipeline
from rjax.models.loading.blocks import AdoptedBuffers, Block, ReusedBuffers, split_rows
from rjax.models.loading.load import load_weights
from rjax.models.loading.pipeline import ParameterPlan, Pipeline
from rjax.models.loading.tensors import TensorEntry, read_header
from rjax.models.sharding import single_device_mesh

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "dtype": "float32",
}
LARGEST = 2 * 64 * 256 * 4  # bytes of gate and up


class SmallBlocks(ReusedBuffers):
    """Reused buffers as on a GPU: the CPU would use them in place."""

    def __init__(self, block_bytes=5000):
        super().__init__(block_bytes)
        self.buffers = set()

    def copy(self, host, block):
        start = host.__array_interface__["data"][0]
        self.buffers.add(start)
        assert host.nbytes == block.size <= self.block_bytes
        return jax.device_put(host.copy(), block.sharding)


class Hooked(AdoptedBuffers):
    """Calls ``hook`` with the number of the block before each block."""

    def __init__(self, hook):
        self.hook, self.count, self.lock = hook, 0, threading.Lock()

    def load(self, block, check):
        with self.lock:
            self.hook(self.count)
            self.count += 1
        return super().load(block, check)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = models.config_from_dict(CONFIG)
    folder = tmp_path_factory.mktemp("saved")
    models.save_model(models.init_model(config), config, folder, dtype="float32")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def load(folder, buffers=None, dtype="float32"):
    config = models.config_from_folder(folder)
    model = Decoder(config, jnp.dtype(dtype))
    return load_weights(model, config, folder, single_device_mesh(), False, buffers)


def weights_file(folder):
    (path,) = folder.glob("*.safetensors")
    return path


def loading_threads():
    return [thread for thread in threading.enumerate() if thread.name == "load-weights"]


# Values.


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float64", "float32", "float16"])
def test_blocks_and_whole_pieces_give_the_same_values(folder, stored, dtype):
    tensors = load_file(weights_file(folder))
    save_file({name: a.astype(stored) for name, a in tensors.items()}, weights_file(folder))
    whole, blocks = load(folder, dtype=dtype), load(folder, SmallBlocks(), dtype)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(blocks), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_array_equal(a, b)
    down = np.asarray(blocks.layers[1].mlp.down.weight[...])
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(down, tensors[name].astype(stored).astype(dtype).T)


@pytest.mark.parametrize("block_bytes", [None, 1, 7, 12, 24, 60, 1000])
@pytest.mark.parametrize(("first", "rows"), [(0, 5), (2, 3), (4, 1)])
def test_blocks_have_each_row_once(tmp_path, block_bytes, first, rows):
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    save_file({"x": values}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["x"]
    replicated = jax.sharding.NamedSharding(single_device_mesh(), jax.P())
    blocks = split_rows(entry, values.dtype, first, (rows, 3), replicated, block_bytes)
    parts = []
    for block in blocks:
        memory = np.empty(block.size, np.uint8)
        block.read(memory, lambda: None)
        assert block.size == math.prod(block.shape) * 4 <= max(12, block_bytes or 60)
        parts.append(memory.view(np.float32).reshape(-1, 3))
    np.testing.assert_array_equal(np.concatenate(parts), values[first : first + rows])


# Programs.


def test_a_program_for_each_distinct_case_alone(folder):
    assembly._run.clear_cache()
    load(folder)
    # qkv and its bias, output, up, down: the same in every layer. The rest needs none.
    assert assembly._run._cache_size() == 5
    load(folder)
    assert assembly._run._cache_size() == 5


# Memory.


def test_assembled_parameters_take_memory_that_was_reserved(folder, monkeypatch):
    reserved = set()

    def reserve(programs):
        found = assembly.reserve(programs)
        reserved.update(array.unsafe_buffer_pointer() for arrays in found for array in arrays)
        return found

    monkeypatch.setattr(pipeline, "reserve", reserve)
    model = load(folder, SmallBlocks())
    taken = {array.unsafe_buffer_pointer() for array in jax.tree.leaves(model)}
    assert len(reserved) >= 6 * 4  # qkv, output, up and down of each layer
    assert reserved <= taken


def test_buffers_are_reused(folder):
    buffers = SmallBlocks()
    load(folder, buffers)
    assert 1 <= len(buffers.buffers) <= 8


def test_the_host_holds_at_most_two_parameters_on_a_cpu(folder):
    live, peak, lock = {}, [0], threading.Lock()

    class Counting(AdoptedBuffers):
        def load(self, block, check):
            array = super().load(block, check)
            with lock:
                live[id(array)] = block.size
                peak[0] = max(peak[0], sum(live.values()))
            weakref.finalize(array, live.pop, id(array))
            return array

    load(folder, Counting(), "bfloat16")
    assert not live
    assert weights_file(folder).stat().st_size > 5 * LARGEST
    assert LARGEST / 2 <= peak[0] <= 1.6 * LARGEST  # down comes before or after gate and up


@pytest.mark.parametrize("ahead_bytes", [0, 100, 450])
def test_bytes_in_flight_are_bounded(ahead_bytes):
    sizes = [10, 200, 3, 40, 40, 100, 100, 7, 7, 7, 300, 1, 90]
    entry = TensorEntry("x", Path("none"), "U8", (300,), 0, 300)
    sharding = jax.sharding.NamedSharding(single_device_mesh(), jax.P())
    plans = [
        ParameterPlan((Block(((entry, 0, n),), np.dtype(np.uint8), (n,), sharding),)) for n in sizes
    ]
    taken = []

    def read(block, check):
        check()
        taken.append(block.size)
        return jnp.full(block.shape, block.size % 256)

    def expected(done):
        bound = max(sum(sizes[done : done + 2]), ahead_bytes)
        return max(n for n in range(len(sizes) + 1) if sum(sizes[done:n]) <= bound)

    with Pipeline(plans, read, ahead_bytes) as values:
        values = iter(values)
        for done, size in enumerate(sizes):
            deadline = time.monotonic() + 30
            while len(taken) < expected(done) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            assert len(taken) == expected(done)
            assert int(next(values)[0][0]) == size % 256
        assert next(values, None) is None
    assert not loading_threads()


# Errors.


def fails(folder, buffers, error, message=None):
    gc.collect()  # of earlier tests
    arrays = len(jax.live_arrays())
    with pytest.raises(error, match=message):
        load(folder, buffers)
    assert not loading_threads()
    gc.collect()
    assert len(jax.live_arrays()) == arrays


def test_a_file_that_is_truncated_meanwhile(folder):
    path = weights_file(folder)
    half = path.stat().st_size // 2
    buffers = Hooked(lambda count: os.truncate(path, half) if count == 5 else None)
    fails(folder, buffers, models.CheckpointError, r"model.safetensors became shorter")


def test_a_file_that_is_removed_meanwhile(folder):
    path = weights_file(folder)
    buffers = Hooked(lambda count: path.unlink() if count == 5 else None)
    fails(folder, buffers, models.CheckpointError, r"model.safetensors cannot be read: No such")


def test_a_device_that_fails(folder):
    def hook(count):
        if count == 7:
            raise RuntimeError("out of memory")

    fails(folder, Hooked(hook), RuntimeError, "out of memory")


def test_ctrl_c(folder):
    def hook(count):
        if count == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)  # the other threads would finish otherwise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fails(folder, Hooked(hook), KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def test_leaving_early_stops_the_threads(folder):
    path = weights_file(folder)
    entry = read_header(path)["model.embed_tokens.weight"]
    sharding = jax.sharding.NamedSharding(single_device_mesh(), jax.P())
    block = Block(((entry, 0, 40),), np.dtype(np.uint8), (40,), sharding)
    with Pipeline([ParameterPlan((block,))] * 100, AdoptedBuffers().load, 0) as values:
        assert next(iter(values))[0].shape == (40,)
    assert not loading_threads()


def test_types_are_checked_before_anything_is_read(folder):
    tensors = load_file(weights_file(folder))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, weights_file(folder))

    def hook(count):
        raise AssertionError(count)

    fails(folder, Hooked(hook), models.CheckpointError, "model.norm.weight has the type I8")
