"""Where the values of a parameter are in a checkpoint."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, or some of its rows, as a part of one parameter.

    Attributes:
        tensor: name in the checkpoint.
        pattern: axes of the tensor in axis letters, those it has merged in brackets, such as
            "(K A H) D". The parameter has the same letters in its own order.
        a: how many entries of the fused axis A this piece fills; pieces fill it in order.
        first_row: where the piece begins in the first axis of the tensor.
        rows: size of the whole first axis of the tensor; None where the piece is all of it.
    """

    tensor: str
    pattern: str
    a: int = 1
    first_row: int = 0
    rows: int | None = None


# Parameter path, such as "layers.0.attention.qkv", to its pieces.
Weights = dict[str, tuple[Piece, ...]]
