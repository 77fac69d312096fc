"""GEMM of few rows with quantised weights, whose partials the next kernel reduces."""
