"""Grouped GEMM: rows multiplied by the weights of their experts."""
