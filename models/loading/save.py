"""Save a model as a Hugging Face folder."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.numpy import save_file

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import split_parameter, tensor_shape


def save_model(
    model: Decoder,
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    shard_bytes: int = 10_000_000,
) -> None:
    """Write config.json and safetensors weights, the inverse of `load_model`.

    It writes one file if everything fits into ``shard_bytes``, else shards of at most that size and
    an index. A larger tensor gets its own shard. Tokenizer files are not written.

    Raises ValueError for families and rotary kinds that cannot be saved, and for quantised weights.
    """
    folder = Path(folder)
    family = FAMILIES[config.architecture]
    if family.write_config is None:
        raise ValueError(f"{config.architecture} cannot be saved, only LlamaForCausalLM")
    if config.schemes:
        raise ValueError(f"weights stored as {config.schemes[0][1].name} cannot be saved")
    dtype = jnp.dtype(dtype)
    written = family.write_config(dataclasses.replace(config, dtype=dtype.name))
    tensors = _tensors(model, config, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    shards = ShardWriter(folder, shard_bytes)
    for name, value in tensors.items():
        shards.add(name, value)
    shards.finish()


def _tensors(model: Decoder, config: ModelConfig, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    weights = FAMILIES[config.architecture].weights(config)
    tensors: dict[str, np.ndarray] = {}
    # The flattening of flax would leave a reference cycle that keeps the weights alive.
    leaves, _ = jax.tree.flatten_with_path(
        nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    for keys, leaf in leaves:
        value = np.asarray(jax.device_get(leaf.get_value())).astype(dtype)
        letters = leaf.get_metadata("letters")
        pieces = weights[".".join(str(key.key) for key in keys)]
        for piece, part in split_parameter(value, letters, pieces, config):
            if piece.rows is None:
                tensors[piece.tensor] = part
                continue
            whole = tensors.setdefault(piece.tensor, np.empty(tensor_shape(piece, config), dtype))
            whole[piece.first_row : piece.first_row + part.shape[0]] = part
    return tensors


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
        path.touch()
        mode = path.stat().st_mode  # safetensors lets nobody else read its files
        try:
            save_file(self._open, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        path.chmod(mode)
        self._written.append((path, list(self._open)))
        self._open = {}
