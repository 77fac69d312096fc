"""Tokens per second of group sampling, through the engine and inside a program's own jit."""
