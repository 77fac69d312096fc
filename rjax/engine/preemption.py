"""Whether a preempted sequence is swapped to host memory or recomputed."""

import dataclasses
from typing import Literal

type PreemptionMode = Literal["auto", "swap", "recompute"]
type PreemptionChoice = Literal["swap", "recompute"]


@dataclasses.dataclass(slots=True)
class PreemptionCost:
    """Chooses the cheaper of the two by the measured cost of a page and of a token.

    Attributes:
        mode: "auto" compares the two; "swap" and "recompute" are fixed.
        page_seconds: seconds to copy one page to the host, or back.
        operation_seconds: overhead of one batched copy.
        token_seconds: seconds to compute one token in a full prompt chunk; 0 until measured, which
            chooses to recompute.
    """

    mode: PreemptionMode = "auto"
    page_seconds: float = 1e-4
    operation_seconds: float = 1e-3
    token_seconds: float = 0.0

    def choose(self, *, pages: float, tokens: int, has_siblings: bool) -> PreemptionChoice:
        """The choice for a sequence with the bytes of ``pages`` pages of its own, without which
        ``tokens`` tokens have to be computed again.

        Pages with other owners stay on the device in both cases. A sequence with live siblings is
        swapped: recomputation finds only the full pages of its siblings in the cache.
        """
        if self.mode != "auto":
            return self.mode
        if has_siblings:
            return "swap"
        swapping = 2 * (self.operation_seconds + pages * self.page_seconds)
        return "swap" if swapping < tokens * self.token_seconds else "recompute"

    def observe(self, tokens: int, seconds: float) -> None:
        """Update ``token_seconds`` from a step of ``tokens`` tokens.

        The fastest step counts, because waiting and compiling only slow a step down.
        """
        found = seconds / tokens
        slower = 1.05 * self.token_seconds  # lets an outlier decay
        self.token_seconds = min(found, slower) if self.token_seconds else found
