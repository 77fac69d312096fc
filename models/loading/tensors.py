"""The tensors of a model folder: headers of safetensors files, reading, and a digest."""

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rjax.models.errors import CheckpointError
from rjax.models.loading.json_files import read_json

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_BLOCKS = 4  # of a tensor, from its start to its end
_BLOCK_BYTES = 1024
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


def type_name(dtype: np.dtype) -> str:
    """The name of a dtype in safetensors files; NumPy's own for one that is not read."""
    return next((name for name, known in _STORED.items() if known == dtype), dtype.name)


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


def read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Read the headers of the folder's safetensors files; return all tensors by name.

    Raises CheckpointError if there are no safetensors weights, if a shard is missing, malformed or
    outside the folder, or if a tensor appears twice or contradicts the index.
    """
    index = folder / _INDEX
    weight_map = _read_index(index) if index.is_file() else None
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    else:
        names = _files_without_index(folder)
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        for entry in read_header(_inside(folder, name)).values():
            if entry.name in tensors:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in both {tensors[entry.name].file.name} and {name} "
                    f"of {folder}; remove the file that does not belong there"
                )
            tensors[entry.name] = entry
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(
                f"{index} places tensor {tensor!r:.200} in {name}, which does not hold it; "
                "download the folder again"
            )
    return tensors


def tensor_names(folder: Path) -> frozenset[str] | None:
    """The names of the folder's tensors; None for a folder without safetensors weights.

    Only the index is read if there is one. The files behind it are checked by `read_tensors`.

    Raises CheckpointError if the index or the only file is malformed.
    """
    index = folder / _INDEX
    if index.is_file():
        return frozenset(_read_index(index))
    if not any(folder.glob("*.safetensors")):
        return None
    return frozenset(read_tensors(folder))


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; expected tensor names to file names")
    for name in weight_map.values():
        plain = isinstance(name, str) and name.endswith(".safetensors")
        if not plain or Path(name).name != name or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{index} names the shard {name!r:.200}; expected the plain name of a .safetensors "
                "file in the same folder"
            )
    return weight_map


def _files_without_index(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files and no {_INDEX}; add the index"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has its weights only as {pickles[0]}, a pickle, which can run code and is "
            "never opened; convert it to safetensors or use a repository that has them"
        )
    raise CheckpointError(f"{folder} has no *.safetensors weights; download the whole model")


def _inside(folder: Path, name: str) -> Path:
    """Path of the file; a symlink may only point into the blobs folder of the hub cache."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks the shard {name}; download the folder again")
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    target = path.resolve()
    if target.parent not in allowed:
        raise CheckpointError(
            f"{path} is a link to {target}, outside the model folder; put the file itself there"
        )
    return path


def weights_digest(folder: Path, unused: tuple[str, ...] = ()) -> str:
    """A SHA-256 hex digest of the names, types, shapes and of a sample of the bytes of tensors.

    It depends neither on the folder nor on how the tensors are divided into files. At most 4 KiB of
    a tensor are read, so 300 tensors take about 20 ms. Weights that differ only between the sampled
    bytes of larger tensors have the same digest.

    Args:
        folder: the folder of the safetensors files.
        unused: starts of the names of tensors that are left out.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(read_tensors(folder).items()):
        if name.startswith(unused):
            continue
        digest.update(repr((name, entry.dtype, entry.shape)).encode())
        digest.update(_sample(entry))
    return digest.hexdigest()


def _sample(entry: TensorEntry) -> bytes:
    """All bytes of a small tensor, and equally spaced blocks of others."""
    if entry.size <= _BLOCKS * _BLOCK_BYTES:
        memory = np.empty(entry.size, np.uint8)
        entry.read_into(memory)
        return memory.tobytes()
    blocks = np.empty((_BLOCKS, _BLOCK_BYTES), np.uint8)
    for i, block in enumerate(blocks):
        entry.read_into(block, (entry.size - _BLOCK_BYTES) * i // (_BLOCKS - 1))
    return blocks.tobytes()
