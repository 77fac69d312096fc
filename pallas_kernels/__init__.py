"""Kernels, a folder for each operation, beside the same in plain JAX; `kernel` says what one is.

Imports nothing of the packages above it; every function is plain JAX that a caller can use inside
its own ``jax.jit``.
"""
