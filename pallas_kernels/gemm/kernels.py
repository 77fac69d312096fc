"""The kernels of the products of a projection, in the order in which they are asked."""

from rjax.pallas_kernels.gemm import base, gate_up_gemm, silu_and_mul, split_k_gemm
from rjax.pallas_kernels.gemm.few_bits.kernels import KERNELS as FEW_BITS_KERNELS
from rjax.pallas_kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    *FEW_BITS_KERNELS,
    *split_k_gemm.KERNELS,
    *gate_up_gemm.KERNELS,
    silu_and_mul.KERNEL,
    *base.PLAIN_KERNELS,
)
