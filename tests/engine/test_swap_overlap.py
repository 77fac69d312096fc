"""What is swapped is on its way while the host goes on; it waits only where too much is under way.

The pools are made by a program that waits for an event, so that nothing on the device runs before.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rjax.batch.page_operations import CopyPages, SwapIn, SwapOut
from rjax.errors import InvalidConfigError, OutOfMemoryError
from rjax.worker.pages import host_memory
from rjax.worker.pages import mover as page_mover
from rjax.worker.pages.mover import PageMover

PAGES, SHAPE = 32, (2, 8, 4)
DATA = np.random.default_rng(0).normal(size=(PAGES, 2, *SHAPE)).astype(np.float32)
MESH = Mesh(np.array(jax.devices()[:1]), ("tensor",))


def make_mover(num_slots: int = 16) -> PageMover:
    return PageMover(
        num_pages=PAGES,
        shape=SHAPE,
        num_pools=2,
        num_slots=num_slots,
        dtype=jnp.dtype(jnp.float32),
        mesh=MESH,
    )


@jax.jit
def busy(x):
    return jax.lax.fori_loop(0, 200, lambda _, x: x @ x, x)


@pytest.fixture
def late():
    """A mover that is warm, its pools, and the event without which they do not come to be."""
    event = threading.Event()

    def wait(x):
        assert event.wait(60)
        return x

    @jax.jit
    def make(x, pools):
        x = jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return [pool + 0 * x[0, 0] for pool in pools]

    mover, x = make_mover(), jnp.eye(256)
    given = [jax.device_put(DATA[:, i], mover._on_device) for i in range(2)]
    event.set()
    pools = jax.block_until_ready(make(busy(x), given))
    mover.warmup(pools)
    event.clear()
    # What waits for another program does not run in the thread that asks for it.
    pools = make(busy(x), given)
    yield mover, pools, event
    event.set()


@pytest.mark.thorough
def test_nothing_waits(late):
    mover, pools, event = late
    pools = mover.run(pools, [SwapOut([0, 1, 2], [4, 5, 6])])
    pools = mover.run(pools, [CopyPages([9], [0]), SwapIn([6, 4], [1, 7])])
    pools = mover.run(pools, [SwapOut([9], [4])])  # a slot that is still to be read
    assert not any(pool.is_ready() for pool in pools)
    event.set()
    want = DATA.copy()
    want[[0, 1, 7]] = DATA[[9, 2, 0]]
    np.testing.assert_array_equal(mover.read(pools, list(range(PAGES))), want)
    pools = mover.run(pools, [SwapIn([4, 5], [20, 21])])
    np.testing.assert_array_equal(mover.read(pools, [20, 21]), DATA[[9, 1]])


def test_too_much_under_way_is_waited_for(late):
    mover, pools, event = late
    most = page_mover._MAX_IN_FLIGHT
    for i in range(most):
        pools = mover.run(pools, [SwapOut([i], [i])])
    assert not event.is_set()
    threading.Timer(0.2, event.set).start()
    mover.run(pools, [SwapIn([0], [9])])
    assert event.is_set()


def test_host_memory_holds_no_more_than_the_slots():
    mover = make_mover(4)
    pools = [jax.device_put(DATA[:, i], mover._on_device) for i in range(2)]

    def kept() -> int:
        return sum(
            a.sharding.memory_kind == "pinned_host" and a.shape == mover.page_shape
            for a in jax.live_arrays()
        )

    before = kept()
    for i in range(20):
        pools = mover.run(pools, [SwapOut([i, i + 1, i + 2], [0, 1 + i % 2, 3])])
        jax.block_until_ready(list(mover._slots.values()))
        assert kept() - before <= 4 + 3
    mover.run(pools, [SwapIn([0, 3], [5, 6])])
    assert kept() - before == 4


def test_nothing_is_compiled_after_a_warmup():
    mover, found = make_mover(PAGES), []
    pools = [jax.device_put(DATA[:, i], mover._on_device) for i in range(2)]
    pools = mover.warmup(pools)

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for count in range(1, 17):
            first, last = list(range(count)), list(range(16, 16 + count))
            operations = [CopyPages(first, last), SwapOut(last, first), SwapIn(first, first)]
            pools = mover.run(pools, operations)
            pools = mover.write(pools, first, mover.read(pools, last))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert found == []
    np.testing.assert_array_equal(mover.read(pools, list(range(16))), DATA[:16])


def test_a_platform_without_page_locked_memory_is_told_of(monkeypatch):
    monkeypatch.setattr(host_memory, "_HOST_KIND", "elsewhere")
    with pytest.raises(InvalidConfigError, match=r"only \[.*'pinned_host'.*set swap_space=0"):
        make_mover()
    assert make_mover(0).page_seconds() == 0


def test_no_more_page_locked_memory_says_what_helps(monkeypatch):
    mover = make_mover()
    pools = [jax.device_put(DATA[:, i], mover._on_device) for i in range(2)]

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")

    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(OutOfMemoryError, match=r"lower swap_space.*HOST_MEMORY_LIMIT_GB"):
        mover.run(pools, [SwapOut([0], [0])])
