"""int8 and int4: signed integers with a float scale."""

import ml_dtypes
import numpy as np

from rjax.models.schemes.scaled import Scaled, register_values
from rjax.models.schemes.values import Values
from rjax.pallas_kernels.gemm.few_bits.interleaving import INTERLEAVED

register_values(
    Values("int8", np.dtype(np.int8), largest=127.0, random_scale=2.7e-4), on_load=Scaled("int8")
)
register_values(
    Values(
        "int4",
        np.dtype(ml_dtypes.int4),
        largest=7.0,
        random_scale=4.3e-3,
        interleaved=INTERLEAVED,
        interleaved_experts=INTERLEAVED,
    ),
    on_load=Scaled("int4", (1, 128), scale_dtype="bfloat16"),
)
