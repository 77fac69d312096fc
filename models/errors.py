"""The error type for unusable checkpoints."""


class CheckpointError(ValueError):
    """A model folder, its config or its weights cannot be used.

    The message is one line that says what was found, what was expected and how to fix it.
    """
