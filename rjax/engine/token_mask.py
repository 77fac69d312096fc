"""How a caller restricts each next token of a sequence, for structured output."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32


@runtime_checkable
class TokenMask(Protocol):
    """Says which tokens may come next, given those so far; one object serves one sequence.

    A mask needs the token before it, which is read only when the next step runs already. So among
    sequences without masks one with a mask runs every other step; where all have masks, each runs
    every step, and the device waits for the host in between. Where ``accept`` raises, the request
    ends with ``finish_reason`` "error" and no other is harmed.
    """

    @property
    def words(self) -> UInt32[np.ndarray, " W"]:
        """Bit v % 32 of word v // 32 says whether token v may come next; ready made."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the token that was sampled and prepare ``words`` for the one after it."""
        ...
