"""Sends tensors in buckets."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm.shared_memory import Sender


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any],
    group: Sender,
    src: int,
    post_iter_func: Callable[[Any], torch.Tensor],
) -> None:
    """Send the tensors that ``post_iter_func`` gives of the items, in order."""
    assert src == 0, "the trainer is rank 0"
    group.send(post_iter_func(item) for item in iterator)
