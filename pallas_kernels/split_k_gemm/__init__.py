"""Split-K GEMM, whose partials the next kernel reduces."""
