"""The gated delta rule: linear attention whose state is a matrix for each value head."""
