"""The kernels of experts and their routing, in the order in which they are asked."""

from rjax.pallas_kernels.experts import base, grouped_gemm, quantised_experts, top_k_routing
from rjax.pallas_kernels.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    top_k_routing.KERNEL,
    quantised_experts.KERNEL,
    grouped_gemm.KERNEL,
    *base.PLAIN_KERNELS,
)
