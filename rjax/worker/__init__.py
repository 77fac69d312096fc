"""The device side: the KV pool, the compiled steps, and the packing of their input."""
