"""Machine code of the Mosaic kernels of a decode step."""
