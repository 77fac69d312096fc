"""Exit statuses of the commands; 0 is success."""

FAILED = 1
"""Nothing was wrong with the input: the engine stopped, or a server gave no answer."""
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
