"""The kernels of the gated delta rule, in the order in which they are asked."""

from rjax.pallas_kernels.gated_delta import base, mosaic
from rjax.pallas_kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (mosaic.KERNEL, *base.PLAIN_KERNELS)
