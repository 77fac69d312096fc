"""Sum of the devices' shares, residual sum and RMSNorm."""
