"""The products of a projection: streaming kernels for few rows, and weights in few bits."""
