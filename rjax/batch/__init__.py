"""The types that the engine and the worker share: sequences, batches, steps and their results."""
