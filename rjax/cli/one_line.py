"""Messages on one line."""


def one_line(error: object) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
