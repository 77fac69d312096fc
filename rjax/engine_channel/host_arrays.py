"""Arrays of any library on the host, for processes in which JAX must not take a GPU."""

import sys
from typing import Any

import ml_dtypes
import numpy as np

_SAME_BITS = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("int8", np.dtype(ml_dtypes.float8_e4m3fn)),
}
"""Types of PyTorch that it has no NumPy array of: one with its bits that it has, and NumPy's."""


def array_on_host(given: Any) -> Any:
    """A tensor of PyTorch, wherever it is, or an array with DLPack on the host as a NumPy array,
    copied only from a device; others as they are."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        tensor = given.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _SAME_BITS:
            return tensor.numpy()
        bits, dtype = _SAME_BITS[name]
        return tensor.view(getattr(torch, bits)).numpy().view(dtype)
    if isinstance(given, np.ndarray | np.generic) or not hasattr(given, "__dlpack__"):
        return given
    try:
        return np.from_dlpack(given)
    except (
        BufferError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # on a device, or a type of JAX alone
        return given
