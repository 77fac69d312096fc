"""The NCCL that JAX has loaded, which another package may have chosen.

PyTorch asks for one exact version of it, and one process has only one. The sampling programs of
several GPUs fail with an older one than XLA expects.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import jax

from rjax.errors import InvalidConfigError

_LIBRARY = "libnccl.so.2"
_FUNCTION, _OLDEST = "ncclGetPeerDevicePointer", "2.29.2"
"""The NCCL function that XLA calls since jax 0.12, and the first version that has it."""


def check_nccl(load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Check that programs for several GPUs can run with this NCCL.

    Args:
        load: finds a library by its name, or raises OSError.

    Raises:
        InvalidConfigError: it is too old for this jax.
    """
    if jax.__version_info__ < (0, 12):
        return
    try:
        library = load(_LIBRARY)
    except OSError:
        return  # XLA says so when it needs it
    if hasattr(library, _FUNCTION):
        return
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    major, minor = divmod(number.value // 100, 100)
    raise InvalidConfigError(
        f"NCCL is {major}.{minor}.{number.value % 100}; jax {jax.__version__} needs {_OLDEST} or "
        "newer on several GPUs. Upgrade the package nvidia-nccl-cu13 (or cu12); PyTorch in the "
        "same environment may hold it back"
    )
