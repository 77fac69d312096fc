"""The slopes of attention with linear biases (Press et al., 2022)."""

import math

import numpy as np
from jaxtyping import Float32


def alibi_slopes(num_heads: int) -> Float32[np.ndarray, " N"]:
    """The slope of each query head: 2^(-8 n / N) for n = 1 ... N where N is a power of two.

    For other N they are those of the power of two below it, then every second one of twice that
    power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * n / power) for n in range(1, power + 1)]
    extra = [2.0 ** (-4 * n / power) for n in range(1, 2 * (num_heads - power), 2)]
    return np.asarray(slopes + extra, np.float32)
