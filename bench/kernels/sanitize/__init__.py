"""Small batches and decode steps under NVIDIA's compute-sanitizer."""
