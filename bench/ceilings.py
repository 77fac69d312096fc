"""Peak copy and matmul rates of the device, measured in the same run as the benchmark."""

import dataclasses

import jax
import jax.numpy as jnp

from bench.kernels.timing import burst_seconds, matmul_rate

_COPY_BYTES = {"gpu": 4 << 30, "cpu": 64 << 20}
_MATMUL_SIZE = {"gpu": 8192, "cpu": 512}


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates on random data, in short bursts (``timing``).

    Attributes:
        copy: bytes per second of a copy on the device, read plus written.
        matmul: FLOP per second of a square bf16 matmul.
    """

    copy: float
    matmul: float

    def seconds(self, moved: float, flops: float) -> float:
        """The roofline: the larger of bytes at the copy rate and FLOP at the matmul rate."""
        return max(moved / self.copy, flops / self.matmul)


def measure_ceilings() -> Ceilings:
    """Measure both rates; takes about a second on a GPU."""
    platform = jax.devices()[0].platform
    x = jax.random.normal(jax.random.key(0), (_COPY_BYTES[platform] // 2,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    rate = 2 * x.nbytes / burst_seconds(lambda: copy(x), 5)
    return Ceilings(rate, matmul_rate(_MATMUL_SIZE[platform]))
