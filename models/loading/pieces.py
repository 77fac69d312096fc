"""Pieces: how the parameters of a model are cut into the tensors of its checkpoint."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rjax.models.config import ModelConfig
from rjax.models.sharding import TENSOR_AXIS, copies_mesh, parameter_sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor, or a range of its rows, that fills a part of one parameter.

    Attributes:
        tensor: name in the checkpoint.
        pattern: axis letters of the tensor, with merged axes in brackets, such as "(K A H) D". The
            parameter has the same letters in its own order.
        a: number of entries of the fused axis A that the piece fills; pieces fill it in order.
        first_row: start of the piece in the first axis of the tensor.
        rows: size of the tensor's first axis; None if the piece is the whole tensor.
        of_expert: the piece fills one entry of axis J, the parameter's first, which the pattern
            lacks. Pieces fill the entries in order, all pieces of an entry after each other.
        offset: added to the values, in the parameter's dtype.
        copies: number of copies of each entry of axis K, next to each other in the parameter; the
            tensor has one.
        layer: the layer whose sizes the axes have; None for those of the model.
    """

    tensor: str
    pattern: str
    a: int = 1
    first_row: int = 0
    rows: int | None = None
    of_expert: bool = False
    offset: float = 0.0
    copies: int = 1
    layer: int | None = None

    def config(self, config: ModelConfig) -> ModelConfig:
        """The config whose sizes the axes have."""
        return config if self.layer is None else config.of_layer(self.layer)


# Parameter path, such as "layers.0.attention.qkv", to its pieces.
Weights = dict[str, tuple[Piece, ...]]


def module_of(piece: Piece) -> str:
    """The module of a weight: "model.layers.0.mlp.up_proj"."""
    return piece.tensor.removesuffix(".weight")


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

    def inverse[A: (jax.Array, np.ndarray)](self, part: A) -> A:
        """The tensor, with its axes unmerged, from its part of a parameter."""
        if self.copied is not None:
            axis, copies = self.copied
            part = part[(slice(None),) * axis + (slice(None, None, copies),)]
        return part.transpose(tuple(self.order.index(i) for i in range(len(self.order))))

    @property
    def is_identity(self) -> bool:
        """Whether the part has the values of the tensor in its order."""
        return self.copied is None and self.order == tuple(range(len(self.order)))


def piece_sizes(piece: Piece, config: ModelConfig) -> dict[str, int]:
    """Size of each axis letter in the checkpoint tensor."""
    sizes = piece.config(config).axis_sizes | {"A": piece.a}
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


def view(
    piece: Piece, letters: str, config: ModelConfig, blocks: Sequence[tuple[str, int]] = ()
) -> View:
    """Sizes of the unmerged axes, and the permutation to the parameter's axes ``letters``.

    Pieces of single experts are stacked before.

    Args:
        piece: the piece; axes that the parameter lacks are left out.
        letters: axis letters of the parameter.
        config: gives each letter its size.
        blocks: (letter, size) of each axis along which neighbouring entries share one.
    """
    sizes, shared, kept = piece_sizes(piece, config), dict(blocks), letters.split()
    flat = [letter for group in groups(piece) for letter in group if letter in kept]
    if piece.of_expert:
        flat = ["J", *flat]
    shape = tuple(sizes[letter] // shared.get(letter, 1) for letter in flat)
    copied = piece.copies > 1 and "K" in kept
    return View(
        shape,
        tuple(flat.index(letter) for letter in kept),
        (kept.index("K"), piece.copies) if copied else None,
    )


def read_shape(piece: Piece, config: ModelConfig) -> tuple[int, ...]:
    """Shape in which the piece is read: all axes but the first are unmerged."""
    first, *others = groups(piece)
    sizes = piece_sizes(piece, config)
    rows = math.prod(sizes[letter] for letter in first)
    return rows, *(sizes[letter] for group in others for letter in group)


def piece_sharding(piece: Piece, config: ModelConfig, mesh: Mesh) -> NamedSharding:
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
    return parameter_sharding(" ".join(letters), shape, mesh)


def experts_of_devices(
    pieces: tuple[Piece, ...], config: ModelConfig, mesh: Mesh
) -> list[tuple[Piece, ...]]:
    """Pieces of single experts, those together that the devices hold in the same place.

    Device d of n holds experts d * J / n and following. A group has one piece of each device, in
    the order of the devices; the groups are in the order of a device's experts.
    """
    J, devices = config.axis_sizes["J"], mesh.shape[TENSOR_AXIS]
    each, local = len(pieces) // J, J // devices
    return [
        tuple(pieces[(device * local + expert) * each + i] for device in range(devices))
        for expert in range(local)
        for i in range(each)
    ]


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
        flat = view(piece, letters, config).inverse(part).reshape(piece_shape(piece, config))
        result.append((piece, np.ascontiguousarray(flat)))
    return result
