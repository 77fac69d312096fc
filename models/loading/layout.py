"""Conversion between checkpoint tensors and parameters."""

import math

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rjax.models.config import ModelConfig
from rjax.models.loading.piece import Piece
from rjax.models.sharding import TENSOR_AXIS, partition_spec

# (sizes of the unmerged axes of a piece, permutation to the axes of the parameter).
View = tuple[tuple[int, ...], tuple[int, ...]]


def groups(piece: Piece) -> list[list[str]]:
    """The letters of each axis of the tensor: [[K, A, H], [D]] for "(K A H) D"."""
    result: list[list[str]] = []
    inside = False
    for symbol in piece.pattern.replace("(", " ( ").replace(")", " ) ").split():
        if symbol == "(":
            inside = True
            result.append([])
        elif symbol == ")":
            inside = False
        elif inside:
            result[-1].append(symbol)
        else:
            result.append([symbol])
    return result


def piece_shape(piece: Piece, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the piece in the checkpoint tensor."""
    sizes = config.axis_sizes | {"A": piece.a}
    return tuple(math.prod(sizes[letter] for letter in group) for group in groups(piece))


def tensor_shape(piece: Piece, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the whole checkpoint tensor."""
    shape = piece_shape(piece, config)
    return shape if piece.rows is None else (piece.rows, *shape[1:])


def view(piece: Piece, letters: str, config: ModelConfig) -> View:
    """Sizes of the unmerged axes, and the permutation to the parameter's axes ``letters``.

    Pieces of single experts are stacked before.
    """
    sizes = config.axis_sizes | {"A": piece.a}
    flat = [letter for group in groups(piece) for letter in group]
    if piece.of_expert:
        flat = ["J", *flat]
    order = tuple(flat.index(letter) for letter in letters.split())
    return tuple(sizes[letter] for letter in flat), order


def piece_sharding(piece: Piece, config: ModelConfig, mesh: Mesh) -> NamedSharding:
    """A sharding of the piece that matches the parameter's, so each device gets only its shard.

    A merged axis is sharded if its first letter is, not counting an A of one entry; otherwise the
    piece is replicated.
    """
    sizes = config.axis_sizes | {"A": piece.a}
    leading = [
        group[1] if group[0] == "A" and piece.a == 1 and len(group) > 1 else group[0]
        for group in groups(piece)
    ]
    shape = tuple(sizes[letter] for letter in leading)
    spec = partition_spec(" ".join(leading), shape, mesh)
    assert spec.count(TENSOR_AXIS) <= 1
    return NamedSharding(mesh, PartitionSpec(*spec))


def split_parameter(
    value: np.ndarray, letters: str, pieces: tuple[Piece, ...], config: ModelConfig
) -> list[tuple[Piece, np.ndarray]]:
    """The inverse of `Assembly`: each piece with its values in the checkpoint layout."""
    result = []
    start = 0
    for piece in pieces:
        part = value
        if "A" in letters.split():
            axis = letters.split().index("A")
            part = value.take(range(start, start + piece.a), axis)
            start += piece.a
        _, order = view(piece, letters, config)
        flat = part.transpose(np.argsort(order)).reshape(piece_shape(piece, config))
        result.append((piece, np.ascontiguousarray(flat)))
    return result
