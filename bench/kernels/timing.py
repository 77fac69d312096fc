"""Device time without a profiler: chains of calls inside one jitted program, slope over repeats."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def seconds_per_call(run: Callable[[], object], repeats: int, rounds: int = 5) -> float:
    """Median over rounds of the slope between ``repeats`` and 3 * ``repeats`` queued runs.

    ``run`` dispatches asynchronously and returns its outputs. The slope drops the constant cost of
    starting and of the last synchronisation; the queue must stay ahead of the device, so a run must
    take the device longer than its dispatch takes the host (about 0.2 ms).
    """
    jax.block_until_ready(run())
    jax.block_until_ready(run())

    def timed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count - 1):
            run()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    slopes = sorted((timed(3 * repeats) - timed(repeats)) / (2 * repeats) for _ in range(rounds))
    return slopes[rounds // 2]


def matmul_rate(size: int = 8192) -> float:
    """FLOP per second of a bf16 matrix product on random data."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / seconds_per_call(lambda: product(a, b), 10)
