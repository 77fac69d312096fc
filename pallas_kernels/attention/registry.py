"""The attention backends, the fastest first."""

from rjax.pallas_kernels.attention.backend import AttentionBackend
from rjax.pallas_kernels.attention.mosaic.backend import BACKEND as MOSAIC
from rjax.pallas_kernels.attention.triton.backend import BACKEND as TRITON
from rjax.pallas_kernels.attention.xla.backend import BACKEND as XLA

BACKENDS: tuple[AttentionBackend, ...] = (MOSAIC, TRITON, XLA)
"""All backends in order of preference. The last one refuses nothing."""
