"""Quantises rows to float8_e4m3fn on Hopper, one launch (Mosaic GPU).

One CTA handles one row: it reads the row once, keeps it in registers, reduces its largest absolute
value (of each group of 128 inputs, if grouped) over the threads, and writes values and scale. Bytes
moved: 3 * E a row and the scales.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rjax.pallas_kernels.mosaic_emit import THREADS, store_strided, widest_vector
from rjax.pallas_kernels.quantised_gemm.quantised_rows import (
    GROUP,
    LARGEST,
    MIN_ABS_MAX,
    QuantisedRows,
    padded_rows,
)


def quantise_rows(h: Float[Array, "T E"], *, grouped: bool = False) -> QuantisedRows:
    """As ``quantised_rows.quantise_rows``; h is 16-bit and E a multiple of 128."""
    from rjax.pallas_kernels.quantised_gemm import quantised_rows
    return quantised_rows.quantise_rows(h, grouped=grouped)
