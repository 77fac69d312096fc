"""Residual sum and RMSNorm."""
