"""The static options of one attention layer."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What stays the same for every call of one layer; hashable, part of the compiled program.

    Attributes:
        scale: factor on the scores, usually 1 / sqrt(H).
        sliding_window: a query at position t sees keys in (t - sliding_window, t]; None for all.
    """

    scale: float
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 token, or None"
            )
