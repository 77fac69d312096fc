"""Conversion between checkpoint tensors and parameters."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rjax.models.config import ModelConfig
from rjax.models.loading.piece import Piece
from rjax.models.sharding import copies_mesh, parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Conversion of a checkpoint tensor to its part of a parameter.

    Attributes:
        shape: sizes of the unmerged axes.
        order: permutation to the axes of the parameter.
        copied: (axis of the parameter, copies of each of its entries), or None.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    copied: tuple[int, int] | None = None

    def __call__(self, tensor: jax.Array) -> jax.Array:
        """The part; traced. The first axis may be a device's share."""
        part = tensor.reshape(-1, *self.shape[1:]).transpose(self.order)
        if self.copied is None:
            return part
        axis, copies = self.copied
        return jnp.repeat(part, copies, axis)

    @property
    def is_identity(self) -> bool:
        """Whether the part has the values of the tensor in its order."""
        return self.copied is None and self.order == tuple(range(len(self.order)))


def piece_sizes(piece: Piece, config: ModelConfig) -> dict[str, int]:
    """Size of each axis letter in the checkpoint tensor."""
    sizes = config.axis_sizes | {"A": piece.a}
    return sizes | {"K": sizes["K"] // piece.copies}


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
    sizes = piece_sizes(piece, config)
    return tuple(math.prod(sizes[letter] for letter in group) for group in groups(piece))


def tensor_shape(piece: Piece, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the whole checkpoint tensor."""
    shape = piece_shape(piece, config)
    return shape if piece.rows is None else (piece.rows, *shape[1:])


def view(piece: Piece, letters: str, config: ModelConfig) -> View:
    """Sizes of the unmerged axes, and the permutation to the parameter's axes ``letters``.

    Pieces of single experts are stacked before.
    """
    sizes = piece_sizes(piece, config)
    flat = [letter for group in groups(piece) for letter in group]
    if piece.of_expert:
        flat = ["J", *flat]
    order = tuple(flat.index(letter) for letter in letters.split())
    return View(tuple(sizes[letter] for letter in flat), order, copied_axis(piece, letters))


def copied_axis(piece: Piece, letters: str) -> tuple[int, int] | None:
    """(axis K of the parameter, copies), if the piece is copied along it."""
    if piece.copies == 1 or "K" not in letters.split():
        return None
    return letters.split().index("K"), piece.copies


def read_shape(piece: Piece, config: ModelConfig) -> tuple[int, ...]:
    """Shape in which the piece is read: all axes but the first are unmerged."""
    first, *others = groups(piece)
    sizes = piece_sizes(piece, config)
    rows = math.prod(sizes[letter] for letter in first)
    return rows, *(sizes[letter] for group in others for letter in group)


def piece_sharding(
    piece: Piece, config: ModelConfig, mesh: Mesh, *, expert_parallel: bool = False
) -> NamedSharding:
    """A sharding of `read_shape` that matches the parameter's, so each device gets only its shard.

    The first axis is sharded if its first letter is, not counting an A of one entry. The copies of
    KV heads get the same shard. Otherwise the piece is replicated.
    """
    sizes = piece_sizes(piece, config)
    first, *others = groups(piece)
    skips = first[0] == "A" and piece.a == 1 and len(first) > 1
    letters = [first[skips], *(letter for group in others for letter in group)]
    shape = tuple(sizes[letter] for letter in letters)
    if piece.copies > 1:
        mesh = copies_mesh(mesh, piece.copies)
    return parameter_sharding(" ".join(letters), shape, mesh, expert_parallel=expert_parallel)


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
        part_view = view(piece, letters, config)
        if part_view.copied is not None:
            axis, copies = part_view.copied
            part = part.take(range(0, part.shape[axis], copies), axis)
        flat = part.transpose(np.argsort(part_view.order)).reshape(piece_shape(piece, config))
        result.append((piece, np.ascontiguousarray(flat)))
    return result
