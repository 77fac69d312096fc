"""The attention backends, the fastest first."""

from pallas_kernels.attention.backend import AttentionBackend
from pallas_kernels.attention.mosaic.backend import BACKEND as MOSAIC
from pallas_kernels.attention.triton.backend import BACKEND as TRITON
from pallas_kernels.attention.xla.backend import BACKEND as XLA

BACKENDS: tuple[AttentionBackend, ...] = (MOSAIC, TRITON, XLA)
"""In order of preference. The last one refuses nothing."""
