"""Mapping from parameters to checkpoint tensors."""

import dataclasses


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
    """

    tensor: str
    pattern: str
    a: int = 1
    first_row: int = 0
    rows: int | None = None
    of_expert: bool = False
    offset: float = 0.0
    copies: int = 1


# Parameter path, such as "layers.0.attention.qkv", to its pieces.
Weights = dict[str, tuple[Piece, ...]]
