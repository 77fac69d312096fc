"""Tokenizers without PyTorch."""

import sys


def leave_torch_out() -> None:
    """Have ``import torch`` fail in this process, unless it is imported already.

    transformers imports PyTorch where it is installed, which takes several seconds, and its
    tokenizers do not need it. This is for processes that are rjax's own: it is not undone.
    """
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
