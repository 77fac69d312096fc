"""A step on the devices: its shapes, its input, its program, and the queue of several steps."""
