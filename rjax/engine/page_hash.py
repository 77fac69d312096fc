"""Keys of the prefix cache: a SHA-256 chain over the tokens of full pages."""

import hashlib
from collections.abc import Sequence

import numpy as np


def root_key(*parts: str) -> bytes:
    """The chain's first key, from all that KV depends on besides tokens (model, dtype, ...)."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class PageHashes:
    """Keys of one token stream's full pages, computed once each, in order.

    Key i is SHA-256(key i-1, tokens of page i), so equal keys mean equal tokens from the start: no
    token comparison is needed, and no short hash can collide two users' prompts.
    """

    __slots__ = ("_page_size", "_root", "keys")

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self.keys: list[bytes] = []

    def extend(self, tokens: Sequence[int], start: int = 0) -> None:
        """Add the keys of full pages, ``tokens`` being the stream from position ``start`` on.

        ``start`` must be at or before the end of the last page that has a key.
        """
        S = self._page_size
        first = len(self.keys) * S - start
        data = np.asarray(tokens[first:], np.int64)
        for page in range(data.size // S):
            parent = self.keys[-1] if self.keys else self._root
            block = data[page * S : (page + 1) * S].tobytes()
            self.keys.append(hashlib.sha256(parent + block).digest())
