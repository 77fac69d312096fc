"""The interface that restricts the next token of a sequence, for structured output."""

from typing import Protocol, no_type_check, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from rjax.errors import InvalidRequestError


@runtime_checkable
class TokenMask(Protocol):
    """Says which tokens may come next, given those so far; one object serves one sequence.

    A mask depends on the last token, which the host reads only while the next step runs. That step
    is therefore forward-only: the device computes its logits while the host prepares the masks, and
    then samples. If ``accept`` raises, the request ends with ``finish_reason`` "error" and no other
    request is affected.

    The engine's thread calls ``accept``. If a mask has an attribute ``may_be_slow`` that is true,
    another thread does, and only its sequence waits for it. Such a mask leaves Python's lock to
    others meanwhile.
    """

    @property
    def bitmask(self) -> UInt32[np.ndarray, " W"]:
        """Bit v % 32 of word v // 32 says whether token v may come next; W = ceil(V / 32) words."""
        ...

    def accept(self, token_id: int) -> None:
        """Take the sampled token and prepare the ``bitmask`` of the next one."""
        ...


@no_type_check  # masks of users are checked by hand, with readable messages
def read_bitmask(mask: TokenMask, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """The bitmask of a mask. Bits beyond ``vocab_size``, the width of the logits, are ignored.

    Raises:
        InvalidRequestError: it is no mask, its bitmask cannot be read, has another form or allows
            no token.
    """
    if not isinstance(mask, TokenMask):
        raise InvalidRequestError(
            f"a mask is {type(mask).__name__}; give an object with bitmask and accept"
        )
    try:
        bitmask = mask.bitmask
    except Exception as error:
        raise InvalidRequestError(f"the bitmask of a mask cannot be read: {error!r}") from error
    words, bits = -(-vocab_size // 32), vocab_size % 32
    found = getattr(bitmask, "dtype", type(bitmask).__name__), getattr(bitmask, "shape", ())
    if not isinstance(bitmask, np.ndarray) or found != (np.uint32, (words,)):
        raise InvalidRequestError(
            f"the bitmask of a mask is {found[0]}{[*found[1]]}; give uint32[{words}], a bit for "
            f"each of {vocab_size} tokens"
        )
    last = int(bitmask[-1]) & ((1 << bits) - 1 if bits else -1)
    if not last and not bitmask[:-1].any():
        raise InvalidRequestError("a mask allows no token of the model; allow at least one")
    return bitmask
