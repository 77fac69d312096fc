"""Tensors of a torch trainer on their way through Ray's object store."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class SentTensor(NamedTuple):
    """A tensor without torch's types.

    Attributes:
        name: its name in the checkpoint.
        dtype: torch's name of its dtype, such as "bfloat16".
        shape: its shape.
        data: its bytes, uint8 [bytes].
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def sent(name: str, tensor: Any) -> SentTensor:
    """A copy of a torch tensor in host memory; the trainer may change the tensor afterwards."""
    copied = tensor.detach().to("cpu", copy=True).contiguous()
    uint8 = tensor.new_empty(0).byte().dtype  # torch is the trainer's, and not imported here
    data = copied.reshape(-1).view(uint8).numpy()
    return SentTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def received(tensor: SentTensor) -> np.ndarray:
    """The array of a tensor that was sent; its memory is that of ``data``.

    Raises:
        TypeError: NumPy and ml_dtypes have no such dtype.
    """
    kind = getattr(ml_dtypes, tensor.dtype, None) or tensor.dtype
    return tensor.data.view(np.dtype(kind)).reshape(tensor.shape)
