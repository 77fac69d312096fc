"""Page groups: layers that share the pages of a sequence, divided by their sliding windows.

All pages come from one pool of ``num_pools`` K and V arrays. A page holds S tokens of the layers of
one group, at most one layer for each array. Where groups differ in the size of a layer's KV, a page
of an array holds several layers of the groups whose KV is smaller, one behind the other. A sequence
has one page table a group. A group whose layers have a window keeps only the pages that the next
token can reach, so its other pages go back to the pool, which all groups allocate from (as vLLM's
hybrid KV cache manager does).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

_MAX_GROUPS = 8  # page tables of a sequence
_MAX_GROUPS_OF_SIZES = 24  # where layers differ: with few layers a group, pages are filled

STATES = -1
"""In place of a page group: the layers without KV, which have a state instead."""


class GroupKind(NamedTuple):
    """The page groups first to stop - 1, whose KV lives equally long.

    Attributes:
        window: sliding window of their layers, in tokens; None without end.
        first, stop: numbers of the groups.
    """

    window: int | None
    first: int
    stop: int


class LayerPlace(NamedTuple):
    """Where a layer has its KV.

    Attributes:
        group: number of the page group.
        pool: index of the K and V arrays.
        part: index of the layer among those of a page of these arrays.
        parts: number of layers that such a page holds in this group.
    """

    group: int
    pool: int
    part: int
    parts: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroups:
    """The page groups of a model.

    Attributes:
        windows: sliding window of each group, in tokens; None without end, for full attention.
            Groups with equal windows are neighbours, and the first group is the only one with its
            window.
        layers: (group, place in its pages) of each layer; (STATES, index of its arrays) of a layer
            with a state in place of KV. A place is the index of a K and V array, times the layers
            that a page of it holds, plus the index of the layer among those. A layer that attends
            over the KV of another has the same.
        layers_a_page: layers that a page of an array holds, for each group; empty for one each.
    """

    windows: tuple[int | None, ...]
    layers: tuple[tuple[int, int], ...]
    layers_a_page: tuple[int, ...] = ()

    @property
    def num_pools(self) -> int:
        """Number of K arrays of the pool, and of V arrays: those of the largest group."""
        of_layers = range(len(self.layers))
        return 1 + max(self.place(i).pool for i in of_layers if self.layers[i][0] != STATES)

    def place(self, layer: int) -> "LayerPlace":
        """Where a layer has its KV."""
        group, place = self.layers[layer]
        each = self.layers_a_page[group] if self.layers_a_page else 1
        return LayerPlace(group, *divmod(place, each), each)

    @property
    def num_state_layers(self) -> int:
        """Number of layers with a state in place of KV."""
        return sum(group == STATES for group, _ in self.layers)

    @property
    def num_tables(self) -> int:
        """Page tables of a sequence: that of its states, if there are any, is the last."""
        return len(self.windows) + (self.num_state_layers > 0)

    @property
    def kinds(self) -> tuple[GroupKind, ...]:
        """The groups with equal windows, in the order of the groups."""
        kinds, first = [], 0
        for window, members in itertools.groupby(self.windows):
            stop = first + len(list(members))
            kinds.append(GroupKind(window, first, stop))
            first = stop
        return tuple(kinds)

    def layers_of(self, window: int | None) -> int:
        """Number of layers with this window, without those that have a state."""
        of_layers = (group for group, _ in self.layers if group != STATES)
        return sum(self.windows[group] == window for group in of_layers)


def one_group(num_layers: int) -> PageGroups:
    """All layers in one group without end."""
    return PageGroups((None,), tuple((0, layer) for layer in range(num_layers)))


def with_states(groups: PageGroups, has_state: tuple[bool, ...]) -> PageGroups:
    """The page groups of a model with states, from those of its layers with KV.

    has_state: whether each layer of the model has a state in place of KV.
    """
    with_kv, state = iter(groups.layers), itertools.count()
    layers = [(STATES, next(state)) if found else next(with_kv) for found in has_state]
    return dataclasses.replace(groups, layers=tuple(layers))


def with_shared_kv(groups: PageGroups, sources: tuple[int, ...]) -> PageGroups:
    """The page groups of a model with layers that attend over the KV of others.

    Args:
        groups: those of its layers with KV of their own.
        sources: the layer whose KV each layer of the model attends over.
    """
    own = itertools.count()
    numbers = [next(own) if source == layer else -1 for layer, source in enumerate(sources)]
    layers = tuple([groups.layers[numbers[source]] for source in sources])
    return dataclasses.replace(groups, layers=layers)


def page_groups(
    windows: tuple[int | None, ...],
    *,
    page_size: int,
    max_model_len: int,
    heads: tuple[tuple[int, int], ...] = (),
) -> PageGroups:
    """The page groups of a model.

    All layers share one group without end if no window is shorter than a sequence, or if a sequence
    of full length takes no less memory in several groups: all are as large as the largest, and a
    smaller one wastes memory. Layers with other heads always have groups of their own.

    Args:
        windows: sliding window of each layer with KV, in tokens; None for full attention.
        page_size: tokens a page.
        max_model_len: tokens of the longest sequence.
        heads: (KV heads, head dim) of each layer, the same for all layers with one window; empty
            where all layers have the same.
    """
    differ = len(set(heads)) > 1
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        short = window is not None and (differ or window < max_model_len)
        kinds.setdefault(window if short else None, []).append(layer)
    if kinds.keys() <= {None}:
        return one_group(len(windows))
    each = dict.fromkeys(kinds, 1)
    if differ:
        of_kind = {window: heads[layers[0]] for window, layers in kinds.items()}
        assert all(heads[i] == of_kind[kind] for kind, found in kinds.items() for i in found)
        whole = math.lcm(*map(math.prod, of_kind.values()))
        each = {window: whole // math.prod(size) for window, size in of_kind.items()}
    most = _MAX_GROUPS_OF_SIZES if differ else _MAX_GROUPS
    first = None if None in kinds else min(kinds, key=lambda window: len(kinds[window]))
    order = sorted(kinds, key=lambda window: (window != first, window or 0))

    def divided(size: int) -> tuple[int | None, ...]:
        return tuple(
            window
            for window in order
            for _ in range(math.ceil(len(kinds[window]) / (size * each[window])))
        )

    def pages(found: Iterable[int | None]) -> int:
        return pages_held(found, max_model_len, page_size)

    smallest = math.ceil(len(kinds[first]) / each[first])
    counts = [
        size
        for size in range(smallest, len(windows) + 1)
        if len(divided(size)) <= max(most, len(kinds))
    ]
    size = min(counts, key=lambda size: (size * pages(divided(size)), len(divided(size))))
    if not differ and size * pages(divided(size)) >= len(windows) * pages([None]):
        return one_group(len(windows))
    found = divided(size)
    layers = {}
    for window in order:
        for number, layer in enumerate(kinds[window]):
            group, place = divmod(number, size * each[window])
            layers[layer] = (found.index(window) + group, place)
    return PageGroups(
        found,
        tuple(layers[layer] for layer in range(len(windows))),
        tuple([each[window] for window in found]) if differ else (),
    )


def first_page(position: int, window: int | None, page_size: int) -> int:
    """Number of the first page that a query at ``position`` reaches."""
    if window is None:
        return 0
    return max(0, position - window + 1) // page_size


def pages_held(windows: Iterable[int | None], tokens: int, page_size: int) -> int:
    """Pages that a sequence of ``tokens`` tokens needs at most, computed token by token.

    Args:
        windows: sliding window of each page group, in tokens; None for full attention.
        tokens: number of tokens of the sequence.
        page_size: tokens a page.
    """
    every = -(-tokens // page_size)
    return sum(
        every if window is None else min(every, -(-(window - 1) // page_size) + 1)
        for window in windows
    )


def tokens_held(windows: Iterable[int | None], pages: int, page_size: int) -> int:
    """Tokens of the longest sequence that needs no more than ``pages`` pages.

    Without full attention any length may fit; the answer is then ``pages`` pages.
    """
    windows, low, high = tuple(windows), 0, pages
    while low < high:  # pages of one group
        middle = (low + high + 1) // 2
        if pages_held(windows, middle * page_size, page_size) <= pages:
            low = middle
        else:
            high = middle - 1
    return low * page_size
