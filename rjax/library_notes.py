"""Keeps notes of libraries off the terminal."""

import logging


def quiet_library_notes() -> None:
    """Suppress the libraries' notes about missing GPUs and PyTorch, in a process of rjax's own."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    logging.getLogger("transformers").addFilter(
        lambda record: not record.getMessage().startswith("PyTorch was not found")
    )
