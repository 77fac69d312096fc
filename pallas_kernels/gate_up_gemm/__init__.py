"""Gate and up projections and their SwiGLU activation, in one launch."""
