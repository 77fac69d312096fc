"""The kernels of weights in few bits, in the order in which they are asked."""

from rjax.pallas_kernels.gemm.few_bits import (
    fp8_dot,
    merge_quantise,
    norm_quantise,
    one_row,
    quantised_gemm,
)
from rjax.pallas_kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    *quantised_gemm.KERNELS,
    *one_row.KERNELS,
    *norm_quantise.KERNELS,
    merge_quantise.KERNEL,
    *fp8_dot.KERNELS,
)
