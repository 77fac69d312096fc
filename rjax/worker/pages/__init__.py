"""The KV pool on the devices: its size, its arrays, and the copies of its pages."""
