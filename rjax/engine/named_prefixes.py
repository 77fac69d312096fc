"""The engine's named prefixes: computed by requests, pinned, saved and loaded.

The layer above, which knows texts, is `rjax.api.prefixed_prompts`.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from typing import no_type_check

import numpy as np

from rjax.batch.page_groups import first_page, pages_held
from rjax.batch.page_hash import PageHashes, block_bytes, group_key
from rjax.batch.sequence import Sequence
from rjax.batch.step_worker import StepWorker
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.state_pages import STATES_OF_A_SEQUENCE, StatePages
from rjax.engine.prefix_file import PrefixOrigin, SavedPrefix, load_prefix_file, save_prefix_file
from rjax.engine.protocol import KeepAs, NamedPrefix
from rjax.engine.request import Request
from rjax.engine.request_checks import RequestChecks
from rjax.errors import InvalidConfigError, InvalidRequestError, OutOfMemoryError

SHARED_PREFIX = "\0shared prefix"
"""Name of the prefix of ``set_shared_prefix``; no name or request id of a caller starts so."""

REFILL = "\0refill "
"""Ids of requests that fill unloaded prefixes again begin so; the name of the prefix follows."""


@dataclasses.dataclass(frozen=True, slots=True)
class PendingPrefix:
    """A prefix that is checked and not pinned yet.

    Attributes:
        name, text: see `KeepAs`.
        tokens: the tokens of the prefix.
        hashes: hash chain of its full pages.
        salt: cache salt of its requests.
    """

    name: str
    text: str | None
    tokens: list[int]
    hashes: PageHashes
    salt: str | None


class PinnedPrefixes:
    """Named prefixes, each with a reference on its pages; pages that several share exist once.

    In page groups with windows, a prefix holds the pages that the token after it reaches, and its
    last token.

    Args:
        blocks: the pages of the pool.
        max_model_len: tokens of the longest sequence; its pages must remain for sequences.
        windows: window of each page group, in tokens; None for full attention.
        states: states of the layers that have them in place of KV: a prefix holds the state behind
            its last full page. None without such layers.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_model_len: int,
        windows: tuple[int | None, ...] = (None,),
        states: StatePages | None = None,
    ) -> None:
        self._blocks, self._states = blocks, states
        self._reserve = pages_held(windows, max_model_len, blocks.page_size)
        self._windows = windows
        self._named: dict[str, NamedPrefix] = {}

    def pages(self) -> list[int]:
        """Pinned pages, once for each prefix that holds them."""
        return [page for prefix in self._named.values() for page in prefix.pages]

    def all(self) -> list[NamedPrefix]:
        """The prefixes, in the order in which they were pinned."""
        return list(self._named.values())

    def unload(self) -> None:
        """Release the KV of all prefixes, which keep their names and tokens and hold no pages."""
        for prefix in self.all():
            self._release(prefix)
            self._named[prefix.name] = dataclasses.replace(prefix, pages=(), state=None)

    def awaits(self, prefix: PendingPrefix) -> bool:
        """Whether there is such a prefix, with the same tokens and salt, and it is unloaded."""
        known = self._named.get(prefix.name)
        wanted = tuple(prefix.tokens), prefix.salt
        return (
            known is not None
            and (known.token_ids, known.cache_salt) == wanted
            and (not known.pages)
        )

    def get(self, name: str) -> NamedPrefix:
        """The prefix of this name.

        Raises:
            InvalidRequestError: there is none.
        """
        if name not in self._named:
            known = ", ".join(map(repr, self._named)) or "none"
            raise InvalidRequestError(f"no prefix is named {name!r}; there are: {known}")
        return self._named[name]

    def check_capacity(self, prefix: PendingPrefix) -> None:
        """Check that sequences keep enough pages when this prefix is pinned under its name.

        Raises:
            OutOfMemoryError: they do not.
        """
        others = [p for name, p in self._named.items() if name != prefix.name]
        pinned = {page for other in others for page in other.pages}
        awaited = [len(self.places(len(p.token_ids))) for p in others if not p.pages]
        new = len(self.places(len(prefix.tokens))) + sum(awaited)
        new -= len(pinned.intersection(self._find(prefix, partial=False)))
        if self._states is not None and prefix.hashes.keys:
            held = {other.state for other in others if other.state is not None}
            total = self._states.pool.num_states
            if total - len(held) - 1 < STATES_OF_A_SEQUENCE:
                raise OutOfMemoryError(
                    f"there are {total} states, of which {len(held) + 1} would be pinned; a "
                    f"sequence needs {STATES_OF_A_SEQUENCE}: raise num_states, or drop a prefix"
                )
        total = self._blocks.num_pages
        if total - len(pinned) - new < self._reserve:
            raise OutOfMemoryError(
                f"the KV pool has {total} pages of {self._blocks.page_size} tokens, of which "
                f"{len(pinned) + new} would be pinned; a sequence of full length needs "
                f"{self._reserve}: raise num_pages, lower max_model_len, or drop a prefix"
            )

    def places(self, tokens: int) -> list[tuple[int, int]]:
        """(page group, page number) of each page of a prefix of this length, in order."""
        S = self._blocks.page_size
        return [
            (group, number)
            for group, window in enumerate(self._windows)
            for number in range(first_page(tokens - 1, window, S), -(-tokens // S))
        ]

    def pin_computed(self, prefix: PendingPrefix, sequence: Sequence) -> None:
        """Pin a prefix that a sequence has computed.

        Raises:
            OutOfMemoryError: other prefixes were pinned meanwhile, and there is no room left; or
                the sequence released pages of the prefix, behind a window or because it was
                preempted, and they hold other tokens now.
        """
        self.check_capacity(prefix)
        places = self.places(len(prefix.tokens))
        own = [-1] * len(places)
        held = sequence.pages
        if held and all(held):  # a preempted sequence has no pages, but they may be cached
            own = [held[group][number] for group, number in places]
        self._register(prefix, own)
        found = self._find(prefix)
        pages = [mine if page is None else page for page, mine in zip(found, own, strict=True)]
        if -1 in pages:
            raise OutOfMemoryError(
                f"pages of the prefix {prefix.name!r} were taken before it was pinned: its request "
                "was preempted, or generated more tokens than a sliding window holds; compute it "
                "again, with max_tokens=1"
            )
        state = None
        if self._states is not None and prefix.hashes.keys:
            state = self._states.pin(prefix.hashes.keys[-1])
            if state is None:
                raise OutOfMemoryError(
                    f"the state of the prefix {prefix.name!r} was taken before it was pinned: "
                    "compute it again, with max_tokens=1"
                )
        self._pin(prefix, pages, state)

    def place(self, prefix: PendingPrefix) -> tuple[list[int], bool]:
        """Pin a prefix whose KV comes from elsewhere.

        Returns:
            Indices of the prefix's pages that the caller must fill before the next step, and
            whether its state is to be filled too; the others were in the cache.

        Raises:
            OutOfMemoryError: running sequences hold the pages.
        """
        found = self._find(prefix)
        cached = [page for page in found if page is not None]
        self._blocks.acquire(cached)
        new = self._blocks.allocate(len(found) - len(cached))
        if new is None:
            self._blocks.release(cached)
            raise OutOfMemoryError("the running requests hold the pages; load the prefix later")
        state, is_new = None, False
        if self._states is not None and prefix.hashes.keys:
            state = self._states.pin(prefix.hashes.keys[-1])
            is_new = state is None
            if is_new:
                state = self._states.pool.allocate()
            if state is None:
                self._blocks.release([*cached, *new])
                raise OutOfMemoryError(
                    "the running requests hold the states; load the prefix later"
                )
        rest = iter(new)
        pages = [next(rest) if page is None else page for page in found]
        self._register(prefix, pages)
        if self._states is not None and state is not None and is_new:
            self._states.pool.register(state, prefix.hashes, len(prefix.hashes.keys) - 1)
        self._pin(prefix, pages, state)
        self._blocks.release(pages)
        return [index for index, page in enumerate(found) if page is None], is_new

    def drop(self, name: str, *, missing_ok: bool = False) -> None:
        """Unpin a prefix; its pages may be evicted like any other.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        if missing_ok and name not in self._named:
            return
        self._release(self.get(name))
        del self._named[name]

    def put_unloaded(self, prefix: PendingPrefix) -> None:
        """Keep the name and the tokens of a prefix, in place of those that it had before."""
        self.drop(prefix.name, missing_ok=True)
        self._named[prefix.name] = NamedPrefix(
            prefix.name, tuple(prefix.tokens), prefix.salt, (), prefix.text
        )

    def _release(self, prefix: NamedPrefix) -> None:
        self._blocks.release(prefix.pages)
        if prefix.state is not None:
            assert self._states is not None
            self._states.pool.release([prefix.state])

    def _register(self, prefix: PendingPrefix, pages: list[int]) -> None:
        """Enter pages that hold a prefix into the prefix cache.

        Some may be missing there: another page held the same tokens when they were computed, and
        has been evicted since.
        """
        hashes, S = prefix.hashes, self._blocks.page_size
        rest = block_bytes(prefix.tokens[len(hashes.keys) * S :])
        for (group, n), page in zip(self.places(len(prefix.tokens)), pages, strict=True):
            parent = group_key(hashes.parent(n), group)
            if page < 0:
                continue  # given back; perhaps it is cached
            if n < len(hashes.keys):
                key = group_key(hashes.keys[n], group)
                self._blocks.register(page, key, parent, hashes.blocks[n], first=n == 0)
            else:
                self._blocks.register_partial(page, parent, rest)

    def _find(self, prefix: PendingPrefix, *, partial: bool = True) -> list[int | None]:
        """The cached page at each place of a prefix, with no reference taken; with ``partial`` call
        it between two steps."""
        hashes, S = prefix.hashes, self._blocks.page_size
        rest = block_bytes(prefix.tokens[len(hashes.keys) * S :])
        if partial:
            self._blocks.begin_step()
        pages: list[int | None] = []
        for group, n in self.places(len(prefix.tokens)):
            if n < len(hashes.keys):
                pages.append(self._blocks.find(group_key(hashes.keys[n], group)))
            elif partial:
                pages.append(self._blocks.find_partial(group_key(hashes.parent(n), group), rest))
            else:
                pages.append(None)
        return pages

    def _pin(self, prefix: PendingPrefix, pages: list[int], state: int | None) -> None:
        """Keep these pages under the prefix's name, in place of those it had before.

        state: its state page, on which the prefix has its reference.
        """
        self._blocks.acquire(pages)
        if not self.awaits(prefix):  # one that is filled again keeps its place in the order
            self.drop(prefix.name, missing_ok=True)
        self._named[prefix.name] = NamedPrefix(
            prefix.name, tuple(prefix.tokens), prefix.salt, tuple(pages), prefix.text, state
        )


class NamedPrefixes:
    """The prefixes that one engine keeps.

    Args:
        blocks: the pages of the pool.
        checks: checks of the names and tokens that users give.
        max_model_len: tokens of the longest sequence, for whose pages there must be room.
        enabled: whether the engine has a prefix cache; without it no prefix can be kept.
        windows: window of each page group, in tokens; None for full attention.
        states: states of the layers that have them in place of KV; None without such layers.

    Attributes:
        pinned: the prefixes whose KV is in the pool.
        pending: the prefix of each live request that computes one.
    """

    def __init__(
        self,
        blocks: BlockManager,
        checks: RequestChecks,
        *,
        max_model_len: int,
        enabled: bool,
        windows: tuple[int | None, ...],
        states: StatePages | None = None,
    ) -> None:
        self.pinned = PinnedPrefixes(blocks, max_model_len, windows, states)
        self.pending: dict[str, PendingPrefix] = {}
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

    def pin_computed(self, request: Request, sequence: Sequence) -> None:
        """Pin the prompt of a sequence that is about to finish, if its request asked for it.

        Where there is no room left, the request gets the OutOfMemoryError.
        """
        if sequence.index or request.request_id not in self.pending:
            return
        prefix = self.pending.pop(request.request_id)
        if request.request_id.startswith(REFILL) and not self.pinned.awaits(prefix):
            return  # it was dropped or replaced meanwhile
        try:
            self.pinned.pin_computed(prefix, sequence)
        except OutOfMemoryError as error:
            request.error = error

    def forget_kv(self, running: Collection[str], root_of: Callable[[str | None], bytes]) -> None:
        """Release the KV of all prefixes, which old weights computed.

        Args:
            running: ids of requests that have started; prefixes that they compute get no KV.
            root_of: the new root key of the chains of a salt.
        """
        self.pinned.unload()
        for request_id, prefix in list(self.pending.items()):
            if request_id in running:
                del self.pending[request_id]
                self.pinned.put_unloaded(prefix)
            else:
                hashes = PageHashes(root_of(prefix.salt), self._page_size)
                hashes.extend(prefix.tokens)
                self.pending[request_id] = dataclasses.replace(prefix, hashes=hashes)

    def listed(self) -> list[NamedPrefix]:
        """The prefixes that have a name of a caller, in the order in which they were added."""
        return [prefix for prefix in self.pinned.all() if prefix.name != SHARED_PREFIX]

    def save(self, name: str, path: str | pathlib.Path, worker: StepWorker) -> None:
        """See `PrefixEngine.save_prefix`."""
        prefix = self.pinned.get(name)
        kv = worker.read_pages(list(prefix.pages))
        state = None if prefix.state is None else worker.read_state(prefix.state)
        saved = SavedPrefix(name, list(prefix.token_ids), kv, prefix.text, state)
        save_prefix_file(path, saved, self._origin(worker))

    def load(
        self,
        path: str | pathlib.Path,
        name: str | None,
        salt: str | None,
        root: bytes,
        worker: StepWorker,
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
        sizes = worker.pool.states
        wanted = sizes.state_bytes if sizes is not None and prefix.hashes.keys else 0
        found = 0 if saved.state is None else saved.state.size
        if found != wanted:
            raise InvalidConfigError(f"{path} holds a state of {found} bytes, not {wanted}")
        new, needs_state = self.pinned.place(prefix)
        placed = self.pinned.get(name)
        if needs_state:
            assert placed.state is not None and saved.state is not None
            worker.write_state(placed.state, saved.state)
        worker.write_pages([placed.pages[index] for index in new], saved.kv[new])
        return placed

    def _origin(self, worker: StepWorker) -> PrefixOrigin:
        dtype = np.dtype(worker.kv_dtype).name
        return PrefixOrigin(worker.fingerprint(), dtype, self._page_size)
