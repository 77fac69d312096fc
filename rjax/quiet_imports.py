"""Keeps what imports print off the terminal."""

import logging


def quiet_imports() -> None:
    """Suppress the messages of JAX and transformers about missing GPUs and PyTorch.

    This is for processes that are rjax's own: it is not undone.
    """
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    logging.getLogger("transformers").addFilter(
        lambda record: not record.getMessage().startswith("PyTorch was not found")
    )
