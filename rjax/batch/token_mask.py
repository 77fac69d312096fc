"""How a caller restricts each next token of a sequence, for structured output."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32


@runtime_checkable
class TokenMask(Protocol):
    """Says which tokens may come next, given those so far; one object serves one sequence.

    A mask needs the token before it, which is read only when the next step runs already. So the
    next step is held before it samples: the device computes its logits while the host prepares the
    masks. Where ``accept`` raises, the request ends with ``finish_reason`` "error" and no other is
    harmed.
    """

    @property
    def words(self) -> UInt32[np.ndarray, " W"]:
        """Bit v % 32 of word v // 32 says whether token v may come next; ready made."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the token that was sampled and prepare ``words`` for the one after it."""
        ...
