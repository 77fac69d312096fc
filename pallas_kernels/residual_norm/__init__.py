"""The residual sum and the norm of its result."""
