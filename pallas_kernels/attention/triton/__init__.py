"""Attention by work list in Triton, for Ampere, Ada and Hopper; its ``api`` needs Triton."""
