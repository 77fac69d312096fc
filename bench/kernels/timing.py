"""Device time without a profiler: chains of calls inside one jitted program, slope over repeats.

A GPU that has worked for a while may draw all the power it is allowed, and slows down. So a time
comes in two kinds: that of bursts of some hundredths of a second, each after a rest, and that of
calls without rest. What is compared must be of one kind.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_REST = 0.05  # seconds


def burst_seconds(run: Callable[[], object], repeats: int = 2, rounds: int = 5) -> float:
    """``seconds_per_call`` of a GPU that has rested before each series."""
    rest = _REST if jax.default_backend() == "gpu" else 0.0
    return seconds_per_call(run, repeats, rounds, rest)


def seconds_per_call(
    run: Callable[[], object], repeats: int, rounds: int = 5, rest: float = 0.0
) -> float:
    """Median over rounds of the slope between ``repeats`` and 3 * ``repeats`` queued runs.

    ``run`` dispatches asynchronously and returns its outputs. The slope drops the constant cost of
    starting and of the last synchronisation; the queue must stay ahead of the device, so a run must
    take the device longer than its dispatch takes the host (about 0.2 ms). Each series of runs
    follows ``rest`` seconds without any.
    """
    jax.block_until_ready(run())
    jax.block_until_ready(run())

    def timed(count: int) -> float:
        time.sleep(rest)
        start = time.perf_counter()
        for _ in range(count - 1):
            run()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    slopes = sorted((timed(3 * repeats) - timed(repeats)) / (2 * repeats) for _ in range(rounds))
    return slopes[rounds // 2]


def matmul_rate(size: int = 8192) -> float:
    """FLOP per second of a bf16 matrix product on random data, in bursts."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / burst_seconds(lambda: product(a, b), 10)
