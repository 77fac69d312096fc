"""The static options of one attention layer."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Static options of one layer; hashable, part of the compiled program.

    Options with a number a head (ALiBi slopes, sinks, scales of quantised pages) are array
    arguments of the attention functions, so that they can be parameters and be sharded over heads.

    Attributes:
        scale: factor on the scores, usually 1 / sqrt(H).
        sliding_window: a query at position t sees keys in (t - sliding_window, t]; None for all.
        soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap), before ALiBi and the mask
            (Gemma 2, 2024); None for no cap.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {self.sliding_window}; it must be at least 1 token, or None"
            )
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(
                f"soft_cap is {self.soft_cap}; it must be positive and finite, or None"
            )
