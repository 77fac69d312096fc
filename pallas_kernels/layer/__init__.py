"""Kernels of more than one operation of a decoder layer."""
