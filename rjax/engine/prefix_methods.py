"""The engine's methods about prefixes that it keeps: shared, named, saved and loaded."""

import pathlib
from collections.abc import Sequence as Tokens
from typing import no_type_check

import numpy as np

from rjax.batch.step_worker import StepWorker
from rjax.closing import Closable
from rjax.engine.block_manager import BlockManager
from rjax.engine.kept_prefix import KeepAs, PendingPrefix
from rjax.engine.pinned_prefixes import NamedPrefix, PinnedPrefixes
from rjax.engine.prefix_file import PrefixOrigin, SavedPrefix, load_prefix_file, save_prefix_file
from rjax.engine.request_checks import RequestChecks
from rjax.errors import InvalidConfigError

SHARED_PREFIX = "\0shared prefix"  # no caller's id or name starts so


class PrefixMethods(Closable):
    """The part of `LLMEngine` that keeps prefixes; the engine sets the attributes."""

    _pinned: PinnedPrefixes
    _checks: RequestChecks
    _worker: StepWorker
    _blocks: BlockManager
    _page_size: int

    def _add_prefix(self, keep_as: KeepAs, token_ids: Tokens[int], salt: str | None = None) -> None:
        """Compute a prefix and keep it; steps until it is there."""
        raise NotImplementedError

    def _check_prefix(
        self, keep_as: KeepAs, token_ids: Tokens[int], salt: str | None
    ) -> PendingPrefix:
        """A prefix that can be kept; errors as `add_prefix`."""
        raise NotImplementedError

    def set_shared_prefix(self, token_ids: Tokens[int]) -> None:
        """Compute the KV of a beginning that prompts will share, and keep it until the next call.

        An empty list only drops the last one. Errors are those of ``add_prefix``.
        """
        self._check_open()
        if len(token_ids):
            self._add_prefix(KeepAs(SHARED_PREFIX), token_ids)
        else:
            self._pinned.drop(SHARED_PREFIX, missing_ok=True)

    @no_type_check  # what users give is checked by hand, with messages for them
    def add_prefix(
        self,
        name: str,
        token_ids: Tokens[int],
        *,
        cache_salt: str | None = None,
        text: str | None = None,
    ) -> None:
        """Compute the KV of a beginning and keep it under a name, until it is dropped or replaced.

        Any number of prefixes live at once; one that begins like another shares its pages. A
        request is served from them by beginning with the same tokens, or by naming the prefix.
        Nothing is compiled anew.

        Steps until the prefix is computed. A caller that serves others meanwhile queues a request
        with ``keep_as`` and goes on stepping.

        Args:
            name: 1 to 256 characters; a name in use gets the new tokens.
            token_ids: of the prefix.
            cache_salt: only requests with the same salt find it.
            text: what the tokens were made of; kept and saved with them, and not looked at.

        Raises:
            InvalidRequestError: a bad name or salt, too many tokens, or ids out of range.
            InvalidConfigError: the engine was made without a prefix cache.
            OutOfMemoryError: what is left of the pool would not hold a sequence of full length.
        """
        self._check_open()
        self._checks.prefix_name(name)
        self._add_prefix(KeepAs(name, text), token_ids, cache_salt)

    def drop_prefix(self, name: str) -> None:
        """Let go of a named prefix; its pages may be evicted from now on.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        self._check_open()
        self._pinned.drop(name)

    def prefixes(self) -> list[NamedPrefix]:
        """The named prefixes, in the order of their adding."""
        self._check_open()
        return [prefix for prefix in self._pinned.names() if prefix.name != SHARED_PREFIX]

    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        """Write a named prefix's tokens and KV to a safetensors file.

        Raises:
            InvalidRequestError: there is none of this name, or the file cannot be written.
        """
        self._check_open()
        prefix = self._pinned.get(name)
        kv = self._worker.read_pages(list(prefix.pages))
        saved = SavedPrefix(name, list(prefix.token_ids), kv, prefix.text)
        save_prefix_file(path, saved, self._origin)

    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> NamedPrefix:
        """Keep a prefix that ``save_prefix`` wrote, computing nothing; errors as in ``add_prefix``.

        Raises:
            InvalidConfigError: the file is of another model, dtype or page size, or is none.
        """
        self._check_open()
        saved = load_prefix_file(path, self._origin, np.dtype(self._worker.kv_dtype))
        name = saved.name if name is None else name
        self._checks.prefix_name(name)
        wanted = self._check_prefix(KeepAs(name), saved.token_ids, cache_salt)
        tokens, hashes = wanted.tokens, wanted.hashes
        expected = -(-len(tokens) // self._page_size), *self._worker.page_shape
        if saved.kv.shape != expected:
            raise InvalidConfigError(f"{path} holds KV of shape {saved.kv.shape}, not {expected}")
        fresh = self._pinned.place(name, tokens, hashes, cache_salt, saved.text)
        self._worker.write_pages(fresh, saved.kv[len(saved.kv) - len(fresh) :])
        return self._pinned.get(name)

    @property
    def _origin(self) -> PrefixOrigin:
        kind = np.dtype(self._worker.kv_dtype).name
        return PrefixOrigin(self._worker.fingerprint(), kind, self._page_size)
