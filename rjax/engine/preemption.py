"""How a sequence gives up its pages: to host memory, or to be computed again."""

import dataclasses
from typing import Literal

type PreemptionMode = Literal["auto", "swap", "recompute"]
type PreemptionWay = Literal["swap", "recompute"]


@dataclasses.dataclass(slots=True)
class PreemptionCost:
    """Chooses the cheaper way by what a page and a token cost on this machine.

    Attributes:
        mode: "auto" compares; the others are always taken.
        page_seconds: one page to the host, or back.
        operation_seconds: one batched copy, however small.
        token_seconds: one token computed again in a full prompt chunk; 0 while not known, which
            makes recomputing the choice.
    """

    mode: PreemptionMode = "auto"
    page_seconds: float = 1e-4
    operation_seconds: float = 1e-3
    token_seconds: float = 0.0

    def choose(self, *, pages: int, tokens: int, has_siblings: bool) -> PreemptionWay:
        """The way for a sequence that alone holds ``pages`` pages, with ``tokens`` tokens in them.

        What other sequences hold too stays where it is either way. A sequence with live siblings
        swaps: its pages would be found again only as far as they are full.
        """
        if self.mode != "auto":
            return self.mode
        if has_siblings:
            return "swap"
        swapping = 2 * (self.operation_seconds + pages * self.page_seconds)
        return "swap" if swapping < tokens * self.token_seconds else "recompute"

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many tokens in so long; the quickest steps count,
        since waiting and compiling only ever make one slower."""
        found = seconds / tokens
        slower = 1.05 * self.token_seconds  # forgets a lucky measurement in the end
        self.token_seconds = min(found, slower) if self.token_seconds else found
