"""Write safetensors files of a limited size, and their index."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Writes tensors in the order in which they are added.

    The tensors of one shard are held in memory. The files have their final names after `finish`:
    ``model.safetensors`` if there is one, else shards and an index. Weights that the folder holds
    already are removed first.

    Args:
        folder: folder of the files, made if it does not exist.
        shard_bytes: size of a shard; a larger tensor gets its own.

    Raises:
        OSError: a file cannot be written, for example because the disk is full; any method may
            raise it.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in [*folder.glob("model*.safetensors"), folder / _INDEX]:
            old.unlink(missing_ok=True)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._open: dict[str, np.ndarray] = {}
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, value: np.ndarray) -> None:
        """Add a tensor."""
        used = sum(other.nbytes for other in self._open.values())
        if self._open and used + value.nbytes > self._shard_bytes:
            self._write()
        self._open[name] = value
        self._total += value.nbytes

    def finish(self) -> int:
        """Write the last shard and the index; returns the bytes of all tensors."""
        self._write()
        count = len(self._written)
        if count == 1:
            self._written[0][0].rename(self._folder / _WHOLE)
            return self._total
        weight_map = {}
        for number, (path, tensors) in enumerate(self._written, 1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return self._total

    def _write(self) -> None:
        path = self._folder / f"model-{len(self._written) + 1:05d}.safetensors.partial"
        try:
            save_file(self._open, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        self._written.append((path, list(self._open)))
        self._open = {}
