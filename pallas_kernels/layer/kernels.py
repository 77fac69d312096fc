"""The kernels of more than one operation of a layer, in the order in which they are asked."""

from rjax.pallas_kernels.kernel import Kernel
from rjax.pallas_kernels.layer.one_row import kernel as one_row
from rjax.pallas_kernels.layer.post_attention_block import kernel as post_attention_block

KERNELS: tuple[Kernel, ...] = (one_row.KERNEL, post_attention_block.KERNEL)
