"""Reading safetensors headers and tensors."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rjax.models.errors import CheckpointError

_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_STORED = _FLOATS | {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor: ``size`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def stored_dtype(self, wanted: np.dtype | None = None) -> np.dtype:
        """The dtype in the file, for a parameter of the dtype ``wanted``.

        The file may have any float type of 16 to 64 bits for a float parameter, and must have the
        same type for others. None means any float.

        Raises CheckpointError for another type.
        """
        exact = [name for name, dtype in _STORED.items() if dtype == wanted]
        allowed = exact if exact and exact[0] not in _FLOATS else list(_FLOATS)
        if self.dtype not in allowed:
            hint = "" if exact == allowed else ": use an unquantised checkpoint"
            raise CheckpointError(
                f"{self.file.name}: {self.name} has the type {self.dtype}; supported here are "
                f"{', '.join(allowed)}{hint}"
            )
        return _STORED[self.dtype]

    def file_dtype(self) -> np.dtype:
        """The dtype in the file, of those that can be read.

        Raises CheckpointError for another type.
        """
        if self.dtype not in _STORED:
            raise CheckpointError(
                f"{self.file.name}: {self.name} has the type {self.dtype}; supported are "
                f"{', '.join(_STORED)}"
            )
        return _STORED[self.dtype]

    def read_into(self, memory: np.ndarray, start: int = 0) -> None:
        """Fill ``memory`` (bytes) with the bytes of the tensor from ``start`` on.

        The bytes are read, not memory-mapped as by `safe_open`: truncating a mapped file would kill
        the process. The GIL is released meanwhile.

        Raises CheckpointError if the file cannot be read or was truncated.
        """
        left = memoryview(memory)
        try:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(self.offset + start)
                while left:
                    count = stream.readinto(left)
                    if not count:
                        raise CheckpointError(f"{self.file} became shorter while it was read")
                    left = left[count:]
        except OSError as error:
            raise CheckpointError(
                f"{self.file} cannot be read: {error.strerror or error}"
            ) from None

    def read(self, first_row: int = 0, rows: int | None = None) -> np.ndarray:
        """Read a tensor, or ``rows`` of its first axis, into a new array.

        Raises CheckpointError if its type is not supported, or the file cannot be read or was
        truncated.
        """
        dtype = self.file_dtype()
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        self.read_into(memory, first_row * math.prod(self.shape[1:]) * dtype.itemsize)
        return memory.view(dtype).reshape(shape)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, in file order.

    Raises CheckpointError unless the file can be read, its header is well formed and its tensors
    fill the rest of the file without gaps or overlaps (checked by `safe_open`).
    """
    try:
        with safe_open(file, "numpy"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a usable safetensors file: {error}; download it again"
        ) from None
    header.pop("__metadata__", None)
    entries = []
    for name, field in header.items():
        start, stop = field["data_offsets"]
        shape = tuple(field["shape"])
        entries.append(
            TensorEntry(name, file, field["dtype"], shape, 8 + length + start, stop - start)
        )
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    return {entry.name: entry for entry in entries}


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice in its header")
    return result
