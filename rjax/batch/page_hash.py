"""Keys of the prefix cache: a SHA-256 chain over the tokens of full pages."""

import hashlib
from collections.abc import Sequence

import numpy as np


def root_key(*parts: str) -> bytes:
    """The first key of all chains, from everything besides tokens that KV depends on."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def salted_key(root: bytes, salt: str) -> bytes:
    """The first key of a tenant's chains; no key of it equals one under another salt."""
    return hashlib.sha256(b"salt" + root + salt.encode()).digest()


def versioned_key(root: bytes, version: int) -> bytes:
    """The root key of chains of a version of the weights; version 0 has the root itself."""
    return hashlib.sha256(b"weights" + root + str(version).encode()).digest() if version else root


def kept_key(root: bytes) -> bytes:
    """The root key, after an update of the weights, of chains that go on from KV of before.

    Chains that began with different weights keep different roots, so that a request never finds KV
    of weights from before its start.
    """
    return hashlib.sha256(b"kept" + root).digest()


def group_key(key: bytes, group: int) -> bytes:
    """The key of a page of one page group, from the chain key of its tokens."""
    return key + bytes((group,)) if group else key


def is_chain_key(key: bytes) -> bool:
    """Whether a `group_key` is one of the first page group."""
    return len(key) == hashlib.sha256().digest_size


class PageHashes:
    """Chain keys of the full pages of one sequence, each computed once, in order.

    Key i is SHA-256(key i-1, tokens of page i). Equal keys mean equal tokens from the start, so
    tokens are not compared, and prompts of two users cannot collide.

    Attributes:
        keys: chain keys of the full pages so far.
        blocks: the tokens of each full page, as the bytes of an int32 array.
    """

    __slots__ = ("_page_size", "_root", "blocks", "keys")

    def __init__(self, root: bytes, page_size: int) -> None:
        self._root = root
        self._page_size = page_size
        self.keys: list[bytes] = []
        self.blocks: list[bytes] = []

    def parent(self, page: int) -> bytes:
        """The key before the key of this page; all pages before it must have one."""
        return self.keys[page - 1] if page else self._root

    def extend(self, tokens: Sequence[int] | np.ndarray, start: int = 0) -> None:
        """Add the keys of further full pages.

        Args:
            tokens: tokens of the sequence from position ``start`` on.
            start: position at or before the end of the last page that has a key.
        """
        S = self._page_size
        data = block_bytes(tokens[len(self.keys) * S - start :])
        parent = self.parent(len(self.keys))
        for end in range(4 * S, len(data) + 1, 4 * S):
            block = data[end - 4 * S : end]
            parent = hashlib.sha256(parent + block).digest()
            self.keys.append(parent)
            self.blocks.append(block)

    def copy_from(self, other: "PageHashes", pages: int) -> None:
        """Copy the keys of another sequence whose first ``pages`` full pages are the same."""
        self.keys[:] = other.keys[:pages]
        self.blocks[:] = other.blocks[:pages]


def block_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Tokens as the bytes of an int32 array."""
    return np.asarray(tokens, np.int32).tobytes()
