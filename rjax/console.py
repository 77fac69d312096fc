"""What a process of rjax prints: progress bars where they are seen, no warnings of imports."""

import logging
import sys


def quiet_imports() -> None:
    """Suppress the messages of JAX and transformers about missing GPUs and PyTorch.

    This is for processes that are rjax's own: it is not undone.
    """
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    logging.getLogger("transformers").addFilter(
        lambda record: not record.getMessage().startswith("PyTorch was not found")
    )


def bars_are_seen() -> bool:
    """Whether progress bars reach a person: stderr is a terminal or a notebook's."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
