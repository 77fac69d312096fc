"""Index of the largest number over the devices."""
