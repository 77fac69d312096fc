"""The device side: the KV pool, the compiled step, and what it is fed."""
