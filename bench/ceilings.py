"""What the device can do at most, measured in the same run as what is compared with it."""

import dataclasses

import jax
import jax.numpy as jnp

from bench.kernels.timing import burst_seconds, matmul_rate

_COPY_BYTES = {"gpu": 4 << 30, "cpu": 64 << 20}
_MATMUL_SIZE = {"gpu": 8192, "cpu": 512}


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates on random data, in bursts (``timing``).

    Attributes:
        copy: bytes a second of a copy on the device, read and written both counted.
        matmul: FLOP a second of a square bf16 matrix product.
    """

    copy: float
    matmul: float

    def seconds(self, moved: float, flops: float) -> float:
        """The least time for so many bytes and FLOP, one over the other."""
        return max(moved / self.copy, flops / self.matmul)


def measure_ceilings() -> Ceilings:
    """Time both; about a second on a GPU."""
    platform = jax.devices()[0].platform
    x = jax.random.normal(jax.random.key(0), (_COPY_BYTES[platform] // 2,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)
    rate = 2 * x.nbytes / burst_seconds(lambda: copy(x), 5)
    return Ceilings(rate, matmul_rate(_MATMUL_SIZE[platform]))
