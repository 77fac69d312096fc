"""The engine's named prefixes: pinned, computed by requests, saved and loaded."""

import pathlib
from collections.abc import Sequence as Tokens
from typing import Protocol, no_type_check, runtime_checkable

import jax.numpy as jnp
import numpy as np

from rjax.batch.page_hash import PageHashes
from rjax.engine.block_manager import BlockManager
from rjax.engine.named_prefixes.named_prefix import KeepAs, NamedPrefix, PendingPrefix
from rjax.engine.named_prefixes.pending_prefixes import PendingPrefixes
from rjax.engine.named_prefixes.pinned_prefixes import PinnedPrefixes
from rjax.engine.named_prefixes.prefix_file import (
    PrefixOrigin,
    SavedPrefix,
    load_prefix_file,
    save_prefix_file,
)
from rjax.engine.request_checks import RequestChecks
from rjax.errors import InvalidConfigError, InvalidRequestError

SHARED_PREFIX = "\0shared prefix"
"""Name of the prefix of ``set_shared_prefix``; no name or request id of a caller starts so."""


@runtime_checkable
class PageAccess(Protocol):
    """The methods of a worker that read and write the KV of pages."""

    @property
    def kv_dtype(self) -> jnp.dtype:
        """Dtype of the KV pool."""
        ...

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page as ``read_pages`` gives it: (pools, K, S, H)."""
        ...

    def fingerprint(self) -> str:
        """Identifies the model by its configuration and weights."""
        ...

    def read_pages(self, pages: list[int]) -> np.ndarray:
        """The KV in these pages, [X, pools, K, S, H]."""
        ...

    def write_pages(self, pages: list[int], data: np.ndarray) -> None:
        """Put KV into these pages."""
        ...


class NamedPrefixes:
    """The prefixes that one engine keeps.

    Args:
        blocks: the pages of the pool.
        checks: checks of the names and tokens that users give.
        max_model_len: tokens of the longest sequence, for whose pages there must be room.
        enabled: whether the engine has a prefix cache; without it no prefix can be kept.
        windows: window of each page group, in tokens; None for full attention.
    """

    def __init__(
        self,
        blocks: BlockManager,
        checks: RequestChecks,
        *,
        max_model_len: int,
        enabled: bool,
        windows: tuple[int | None, ...],
    ) -> None:
        self.pinned = PinnedPrefixes(blocks, max_model_len, windows)
        self.pending = PendingPrefixes(self.pinned)
        self._checks = checks
        self._page_size = blocks.page_size
        self._enabled = enabled

    @no_type_check  # user input is checked by hand, with readable messages
    def prepare(
        self, keep_as: KeepAs, token_ids: Tokens[int], salt: str | None, root: bytes
    ) -> PendingPrefix:
        """A prefix that can be computed and pinned.

        Args:
            keep_as: name and text.
            token_ids: the tokens of the prefix.
            salt: cache salt of its requests.
            root: first key of its hash chain, which depends on the salt.

        Raises:
            InvalidRequestError, InvalidConfigError, OutOfMemoryError: see
                `PrefixEngine.add_prefix`.
        """
        if not self._enabled:
            raise InvalidConfigError("a shared prefix needs enable_prefix_caching=True")
        if keep_as.name != SHARED_PREFIX:
            self._checks.prefix_name(keep_as.name)
        tokens, _ = self._checks.prompt(token_ids)
        hashes = PageHashes(root, self._page_size)
        hashes.extend(tokens)
        prefix = PendingPrefix(keep_as.name, keep_as.text, tokens, hashes, salt)
        self.pinned.check_capacity(prefix)
        return prefix

    def listed(self) -> list[NamedPrefix]:
        """The prefixes that have a name of a caller, in the order in which they were added."""
        return [prefix for prefix in self.pinned.all() if prefix.name != SHARED_PREFIX]

    def save(self, name: str, path: str | pathlib.Path, worker: PageAccess) -> None:
        """See `PrefixEngine.save_prefix`."""
        prefix = self.pinned.get(name)
        kv = worker.read_pages(list(prefix.pages))
        saved = SavedPrefix(name, list(prefix.token_ids), kv, prefix.text)
        save_prefix_file(path, saved, self._origin(worker))

    def load(
        self,
        path: str | pathlib.Path,
        name: str | None,
        salt: str | None,
        root: bytes,
        worker: PageAccess,
    ) -> NamedPrefix:
        """See `PrefixEngine.load_prefix`; ``root`` is as in `prepare`."""
        saved = load_prefix_file(path, self._origin(worker), np.dtype(worker.kv_dtype))
        name = self._checks.prefix_name(saved.name if name is None else name)
        try:
            prefix = self.prepare(KeepAs(name, saved.text), saved.token_ids, salt, root)
        except InvalidRequestError as error:
            raise InvalidConfigError(f"{path} does not fit this engine: {error}") from error
        expected = len(self.pinned.places(len(prefix.tokens))), *worker.page_shape
        if saved.kv.shape != expected:
            raise InvalidConfigError(f"{path} holds KV of shape {saved.kv.shape}, not {expected}")
        new = self.pinned.place(prefix)
        placed = self.pinned.get(name)
        worker.write_pages([placed.pages[index] for index in new], saved.kv[new])
        return placed

    def _origin(self, worker: PageAccess) -> PrefixOrigin:
        dtype = np.dtype(worker.kv_dtype).name
        return PrefixOrigin(worker.fingerprint(), dtype, self._page_size)
