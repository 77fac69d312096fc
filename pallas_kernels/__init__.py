"""Attention kernels over paged KV, their references and the planner that feeds them.

Imports nothing of the packages above it; every function is plain JAX that a caller can use inside
its own ``jax.jit``.
"""
