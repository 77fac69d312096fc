"""Builds an engine from its options: devices, dtypes, kernels, weights, worker, and a summary."""
