"""Load the weights of a checkpoint folder into an abstract model."""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from rjax.models.config import ModelConfig
from rjax.models.decoder import Decoder
from rjax.models.errors import CheckpointError
from rjax.models.families import FAMILIES
from rjax.models.layers.linear import Linear
from rjax.models.loading.assembly import Assembly
from rjax.models.loading.blocks import split_rows
from rjax.models.loading.checkpoint_folder import read_tensors
from rjax.models.loading.host_buffers import HostBuffers, host_buffers
from rjax.models.loading.layout import piece_shape, piece_sharding, tensor_shape, view
from rjax.models.loading.piece import Piece, Weights
from rjax.models.loading.pipeline import ParameterPlan, Pipeline
from rjax.models.loading.safetensors_header import TensorEntry
from rjax.models.sharding import parameter_sharding

_HEAD = "lm_head.weight"
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
_MAX_NAMES = 5


def load_weights(
    model: Decoder,
    config: ModelConfig,
    folder: Path,
    mesh: Mesh,
    progress: bool,
    buffers: HostBuffers | None = None,
) -> Decoder:
    """Load the parameters from the safetensors files of the folder.

    Several threads read the tensors in file order, copy them to the devices and assemble the
    parameters there. Names, shapes and types are checked against the headers before any data is
    read.

    Memory: in flight (being read, or on the devices and not assembled yet) are at most the tensors
    of the next two parameters. On the CPU that is host memory. Other devices hold up to 512 MiB if
    that is more, and the host one block of 32 MiB for each of 8 threads, whatever the model.

    Args:
        model: with abstract parameters.
        config: of the model.
        folder: with the files.
        mesh: the devices.
        progress: show a bar.
        buffers: host memory for the blocks; None for the kind that the devices need.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has the wrong shape or type, or a file is
            malformed or cannot be read.
    """
    tensors = read_tensors(folder)
    weights = stored_weights(model, FAMILIES[config.architecture].weights(config))
    entries = _match(weights, tensors, config, folder)
    graph, state = nnx.split(model)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()

    def file_position(path: str) -> tuple[str, int]:
        return min(_position(entries[piece.tensor]) for piece in weights[path])

    buffers = buffers or host_buffers(mesh)
    plans = {
        path: _plan(parameters[path], weights[path], entries, config, mesh, buffers.block_bytes)
        for path in sorted(weights, key=file_position)
    }
    total = sum({entry.name: entry.size for entry in entries.values()}.values())
    values: dict[str, jax.Array] = {}
    with (
        tqdm(
            total=total, desc="Loading weights", unit="B", unit_scale=True, disable=not progress
        ) as bar,
        Pipeline(list(plans.values()), buffers.load, buffers.ahead_bytes) as loaded,
    ):
        for (path, plan), value in zip(plans.items(), loaded, strict=True):
            values[path] = value
            bar.update(plan.size)
    filled = [
        (path, leaf.replace(values[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    # A nested state would leave a reference cycle in flax that keeps the weights alive.
    return nnx.merge(graph, nnx.FlatState(filled, sort=True))


def stored_weights(model: Decoder, weights: Weights) -> Weights:
    """The pieces of every stored leaf, given those of the unquantised weights."""
    stored = dict(weights)
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            own = ".".join(map(str, path))
            weight = stored.pop(f"{own}.weight")
            for leaf, _ in module.leaf_letters:
                stored[f"{own}.{leaf}"] = module.scheme.pieces(leaf, weight)
    return stored


def _position(entry: TensorEntry) -> tuple[str, int]:
    return entry.file.name, entry.offset


def _plan(
    parameter: nnx.Variable,
    pieces: tuple[Piece, ...],
    entries: dict[str, TensorEntry],
    config: ModelConfig,
    mesh: Mesh,
    block_bytes: int | None,
) -> ParameterPlan:
    letters: str = parameter.get_metadata("letters")
    abstract = parameter.get_value()
    dtype = np.dtype(abstract.dtype)
    sharding = parameter_sharding(letters, abstract.shape, mesh)
    views = tuple(view(piece, letters, config) for piece in pieces)
    piece_shardings = tuple(piece_sharding(piece, config, mesh) for piece in pieces)
    split = [
        split_rows(
            entries[piece.tensor],
            entries[piece.tensor].stored_dtype(dtype),
            piece.first_row,
            piece_shape(piece, config),
            of_piece,
            block_bytes,
        )
        for piece, of_piece in zip(pieces, piece_shardings, strict=True)
    ]
    blocks = tuple(itertools.chain(*split))
    _, order = views[0]
    if len(blocks) == 1 and blocks[0].dtype == dtype and order == tuple(range(len(order))):
        whole = dataclasses.replace(blocks[0], shape=abstract.shape, sharding=sharding)
        return ParameterPlan((whole,))
    assembly = Assembly(
        blocks=tuple(tuple(block.abstract for block in part) for part in split),
        piece_shardings=piece_shardings,
        views=views,
        axis=letters.split().index("A") if len(pieces) > 1 else None,
        dtype=dtype,
        sharding=sharding,
    )
    return ParameterPlan(blocks, assembly)


def _match(
    weights: Weights, tensors: dict[str, TensorEntry], config: ModelConfig, folder: Path
) -> dict[str, TensorEntry]:
    """Check names and shapes; return the entry of every expected tensor."""
    pieces = {piece.tensor: piece for group in weights.values() for piece in group}
    # A checkpoint of the decoder without a head lacks the prefix "model." in its names.
    if not any(name.startswith("model.") for name in tensors):
        tensors = {
            name if name == _HEAD else f"model.{name}": entry for name, entry in tensors.items()
        }
    missing = pieces.keys() - tensors.keys()
    if missing:
        hint = (
            "; set tie_word_embeddings to true in config.json if the embedding is also the head"
            if missing == {_HEAD}
            else "; the folder is incomplete or config.json describes another model"
        )
        raise CheckpointError(f"{folder} lacks {_listed(missing)}{hint}")
    extra = {
        name for name in tensors.keys() - pieces.keys() if not name.endswith(_IGNORED_SUFFIXES)
    } - ({_HEAD} if config.tie_embeddings else set())
    if extra:
        raise CheckpointError(
            f"{folder} has {_listed(extra)}, which {config.architecture} does not use; the weights "
            "belong to another architecture or config.json is wrong"
        )
    for name, piece in pieces.items():
        found, expected = tensors[name].shape, tensor_shape(piece, config)
        if found != expected:
            raise CheckpointError(
                f"tensor {name!r} of {folder} has the shape {found}; config.json means {expected}"
            )
    if config.tie_embeddings and _HEAD in tensors:
        _check_tied(tensors[_HEAD], tensors[weights["embedding.weight"][0].tensor], folder)
    return {name: tensors[name] for name in pieces}


def _check_tied(head: TensorEntry, embedding: TensorEntry, folder: Path) -> None:
    rows = max(1, (64 << 20) // max(1, embedding.size // max(1, embedding.shape[0])))
    same = head.shape == embedding.shape
    for first in range(0, embedding.shape[0], rows):
        count = min(rows, embedding.shape[0] - first)
        same = same and np.array_equal(
            head.read(first_row=first, rows=count), embedding.read(first_row=first, rows=count)
        )
    if not same:
        raise CheckpointError(
            f"{folder} has an {_HEAD} that differs from its embedding, though config.json ties "
            "them; set tie_word_embeddings to false, or remove the tensor"
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    plural = "tensors" if len(names) > 1 else "the tensor"
    return f"{plural} {', '.join(names[:_MAX_NAMES])}"[:600] + more
