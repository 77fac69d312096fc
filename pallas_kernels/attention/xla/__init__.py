"""Attention by work list in plain JAX."""

from rjax.pallas_kernels.attention.xla.attention import paged_attention

__all__ = ["paged_attention"]
