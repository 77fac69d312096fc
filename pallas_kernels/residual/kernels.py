"""The kernels of the residual stream, in the order in which they are asked."""

from rjax.pallas_kernels.kernel import Kernel
from rjax.pallas_kernels.residual import add_rms_norm, all_reduce, all_reduce_argmax, base

KERNELS: tuple[Kernel, ...] = (
    add_rms_norm.KERNEL,
    *all_reduce.KERNELS,
    all_reduce_argmax.KERNEL,
    *base.PLAIN_KERNELS,
)
