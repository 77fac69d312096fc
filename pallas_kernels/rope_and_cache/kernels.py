"""The kernels that write new K and V into pages, in the order in which they are asked."""

from rjax.pallas_kernels.kernel import Kernel
from rjax.pallas_kernels.rope_and_cache import base, mosaic

KERNELS: tuple[Kernel, ...] = (*mosaic.KERNELS, base.PLAIN_KERNEL)
