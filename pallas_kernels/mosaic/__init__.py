"""What Mosaic GPU kernels share; no other folder names what JAX keeps to itself."""
