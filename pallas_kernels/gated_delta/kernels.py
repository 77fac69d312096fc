"""The kernels of the gated delta rule, in the order in which they are asked."""

from rjax.pallas_kernels.gated_delta import base, conv_step, mosaic
from rjax.pallas_kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (mosaic.KERNEL, conv_step.KERNEL, *base.PLAIN_KERNELS)
