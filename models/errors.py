"""What goes wrong with a checkpoint, in one type."""


class CheckpointError(ValueError):
    """A model folder, its config or its weights cannot be used.

    The message is one line that says what was found, what was expected and how to mend it.
    """
