"""The interface that restricts the next token of a sequence, for structured output."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32


@runtime_checkable
class TokenMask(Protocol):
    """Says which tokens may come next, given those so far; one object serves one sequence.

    A mask depends on the last token, which the host reads only while the next step runs. That step
    is therefore forward-only: the device computes its logits while the host prepares the masks, and
    then samples. If ``accept`` raises, the request ends with ``finish_reason`` "error" and no other
    request is affected.
    """

    @property
    def bitmask(self) -> UInt32[np.ndarray, " W"]:
        """Bit v % 32 of word v // 32 says whether token v may come next; W = ceil(V / 32) words."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the sampled token and prepare the ``bitmask`` of the next one."""
        ...
