"""Device time without a profiler: chains of calls inside one jitted program, slope over repeats.

Under sustained load a GPU at its power limit lowers its clock. So there are two kinds of times: in
short bursts of some hundredths of a second, each after a pause, and in a continuous run. Compare
only times of one kind.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_REST = 0.05  # seconds


def burst_seconds(run: Callable[[], object], repeats: int = 2, rounds: int = 5) -> float:
    """``seconds_per_call`` in short bursts: a GPU pauses before each series."""
    rest = _REST if jax.default_backend() == "gpu" else 0.0
    return seconds_per_call(run, repeats, rounds, rest)


def seconds_per_call(
    run: Callable[[], object], repeats: int, rounds: int = 5, rest: float = 0.0
) -> float:
    """Median over rounds of the slope between ``repeats`` and 3 * ``repeats`` queued runs.

    ``run`` dispatches asynchronously and returns its outputs. The slope cancels the constant cost
    of the start and of the last synchronisation. The host must stay ahead of the device, so a run
    must take longer on the device than its dispatch on the host (about 0.2 ms). The host pauses for
    ``rest`` seconds before each series.
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
    """FLOP per second of a bf16 matmul on random data, in short bursts."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / burst_seconds(lambda: product(a, b), 10)
