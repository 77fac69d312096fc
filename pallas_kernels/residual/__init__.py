"""The residual stream: sums over devices, norms, and the argmax over devices."""
