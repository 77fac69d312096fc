"""The pages of sequences: allocation, page groups, the prefix cache, host memory."""
