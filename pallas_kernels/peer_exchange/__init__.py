"""Memory through which the devices of one process send each other numbers."""
