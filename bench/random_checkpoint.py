"""A checkpoint of random bfloat16 values, in files as Hugging Face writes them."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import tensor_shape

_INDEX = "model.safetensors.index.json"
_ITEM_BYTES = 2
_EXPONENT = 121 << 7  # bits of bfloat16: magnitudes from 2^-6 to 2^-5
_SIGN_AND_MANTISSA = 0x807F


def write_checkpoint(shapes: str, folder: Path, *, file_bytes: int, seed: int = 0) -> list[Path]:
    """The safetensors files of a model of these shapes; files that are there already are kept.

    Args:
        shapes: a key of `SHAPES`.
        folder: where config.json, the files and their index lie; made if needed.
        file_bytes: size of a file at most; a larger tensor has a file of its own.
        seed: of the values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _split(shapes, file_bytes)
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    paths = [folder / name for name in names]
    index = {
        "metadata": {"total_size": sum(_bytes(s) for file in files for s in file.values())},
        "weight_map": {t: name for name, file in zip(names, files, strict=True) for t in file},
    }
    written = json.dumps(index, indent=2) + "\n"
    if (folder / _INDEX).is_file() and (folder / _INDEX).read_text() == written:
        return paths
    config = SHAPES[shapes] | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    rng = np.random.default_rng(seed)
    for path, file in zip(paths, files, strict=True):
        tensors = {name: _random(rng, shape) for name, shape in file.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    (folder / _INDEX).write_text(written)  # last: a folder with an index is complete
    return paths


def _split(shapes: str, file_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors of each file, by name."""
    config = config_from_dict(SHAPES[shapes])
    weights = FAMILIES[config.architecture].weights(config)
    pieces = {piece.tensor: piece for group in weights.values() for piece in group}
    files: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, piece in pieces.items():
        shape = tensor_shape(piece, config)
        if files[-1] and used + _bytes(shape) > file_bytes:
            files.append({})
            used = 0
        files[-1][name] = shape
        used += _bytes(shape)
    return files


def _bytes(shape: tuple[int, ...]) -> int:
    return _ITEM_BYTES * math.prod(shape)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    bits = rng.integers(0, 1 << 16, size=shape, dtype=np.uint16)
    bits &= _SIGN_AND_MANTISSA
    bits |= _EXPONENT
    return bits.view(ml_dtypes.bfloat16)
