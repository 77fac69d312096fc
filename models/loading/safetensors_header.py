"""Reading the header of a safetensors file by hand, trusting nothing in it."""

import dataclasses
import json
import math
import os
import struct
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from models.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ITEM_BITS = {name: 8 * dtype.itemsize for name, dtype in _FLOATS.items()} | {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: ``size`` bytes at ``offset`` of ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self, first_row: int = 0, rows: int | None = None) -> np.ndarray:
        """The tensor, or ``rows`` of its first axis, as a new array.

        Raises CheckpointError for a type that is no float, and for a file that has become shorter.
        """
        if self.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.file.name}: {self.name} has the type {self.dtype}; supported are "
                f"{', '.join(_FLOATS)}: use an unquantised checkpoint"
            )
        dtype = _FLOATS[self.dtype]
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        count = math.prod(shape)
        skip = first_row * math.prod(self.shape[1:]) * dtype.itemsize
        data = np.fromfile(self.file, dtype=dtype, count=count, offset=self.offset + skip)
        if data.size != count:
            raise CheckpointError(f"{self.file} became shorter while it was read")
        return data.reshape(shape)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, by name.

    Raises CheckpointError unless the file can be read, its header is well formed and its tensors
    fill the rest of it exactly, without gap or overlap.
    """
    try:
        text, file_size = _header_text(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _broken(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + len(text)
    entries = [_entry(file, name, value, data_start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size))
    end = data_start
    for entry in entries:
        if entry.offset != end:
            what = "overlaps the tensor before it" if entry.offset < end else "leaves a gap"
            raise _broken(file, f"tensor {entry.name!r} at byte {entry.offset} {what}")
        end += entry.size
    if end != file_size:
        state = "truncated" if end > file_size else "followed by other data"
        raise _broken(file, f"its tensors end at byte {end} of {file_size}: it is {state}")
    return {entry.name: entry for entry in entries}


def _header_text(file: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the whole file."""
    with file.open("rb") as stream:
        file_size = os.fstat(stream.fileno()).st_size
        if file_size < 8:
            raise _broken(file, f"it has {file_size} bytes, and the header alone needs 8")
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(_MAX_HEADER_BYTES, file_size - 8):
            raise _broken(
                file,
                f"its header claims {length} bytes; the file has {file_size} and the limit is "
                f"{_MAX_HEADER_BYTES}",
            )
        return stream.read(length), file_size


def _entry(file: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise _broken(file, f"tensor {name!r} has the type {dtype!r:.80}")
    if not _whole_numbers(shape):
        raise _broken(file, f"tensor {name!r} has the shape {shape!r:.80}")
    if not _whole_numbers(span) or len(span) != 2 or span[0] > span[1]:
        raise _broken(file, f"tensor {name!r} has the offsets {span!r:.80}")
    size = span[1] - span[0]
    if 8 * size != math.prod(shape) * _ITEM_BITS[dtype]:
        raise _broken(file, f"tensor {name!r}: {size} bytes do not hold {dtype} {shape!r:.80}")
    return TensorEntry(name, file, dtype, tuple(shape), data_start + span[0], size)


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _broken(file: Path, what: str) -> CheckpointError:
    name = os.fspath(file)
    return CheckpointError(f"{name} is not a usable safetensors file: {what}; download it again")
