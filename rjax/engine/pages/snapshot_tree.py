"""The snapshots of states, by the cached prefixes at whose ends they are."""

import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """A page of a cached prefix that a snapshot follows, at its end or further on.

    Attributes:
        key: chain key of the page.
        parent: node of the page before it; None for the first page.
        children: keys of the nodes after it.
        state: state page of the snapshot at its end; None without one.
    """

    key: bytes
    parent: "_Node | None"
    children: set[bytes] = dataclasses.field(default_factory=set)
    state: int | None = None


class SnapshotTree:
    """Snapshots by chain key.

    A snapshot serves a prompt only if every page of the prefix before it is cached. It is added
    only then, and `behind` finds those to remove when one of these pages is forgotten. The tree has
    a node for each page before a snapshot: adding one takes O(1) for each page that comes to it.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._of_state: dict[int, _Node] = {}

    def __contains__(self, state: int) -> bool:
        """Whether a state page is a snapshot."""
        return state in self._of_state

    def __iter__(self) -> Iterator[int]:
        """The state pages of all snapshots."""
        return iter(self._of_state)

    def find(self, key: bytes) -> int | None:
        """The state page of the snapshot behind the page of this chain key; None for none."""
        node = self._nodes.get(key)
        return None if node is None else node.state

    def key(self, state: int) -> bytes:
        """Chain key of the last page before a snapshot."""
        return self._of_state[state].key

    def add(self, keys: list[bytes], state: int, is_cached: Callable[[bytes], bool]) -> bool:
        """Add a snapshot behind a chain of pages.

        Args:
            keys: the chain.
            state: its state page, which is no snapshot yet.
            is_cached: whether the page of a chain key is in the prefix cache.

        Returns:
            False, with nothing done, if a page is not cached or the chain has a snapshot.
        """
        known = len(keys)
        while known and keys[known - 1] not in self._nodes:
            if not is_cached(keys[known - 1]):
                return False
            known -= 1
        node = self._nodes[keys[known - 1]] if known else None
        for key in keys[known:]:
            if node is not None:
                node.children.add(key)
            node = self._nodes[key] = _Node(key, node)
        if node is None or node.state is not None:
            return False
        node.state = state
        self._of_state[state] = node
        return True

    def pages_to_last(self, state: int) -> int:
        """Pages between a snapshot and the last one before it on its chain, or the start: those
        that are computed again if it is lost."""
        node, count = self._of_state[state].parent, 1
        while node is not None and node.state is None:
            node, count = node.parent, count + 1
        return count

    def next(self, state: int) -> list[int]:
        """The snapshots behind this one that have no other between."""
        found, nodes = [], [self._of_state[state]]
        for node in nodes:
            for child in map(self._nodes.__getitem__, node.children):
                if child.state is None:
                    nodes.append(child)
                else:
                    found.append(child.state)
        return found

    def remove(self, state: int) -> None:
        """Remove a snapshot, and the nodes that lead to no other."""
        node: _Node | None = self._of_state.pop(state)
        node.state = None
        while node is not None and node.state is None and not node.children:
            del self._nodes[node.key]
            if node.parent is not None:
                node.parent.children.remove(node.key)
            node = node.parent

    def behind(self, key: bytes) -> list[int]:
        """The snapshots whose chain has the page of this key, those of the longest chains first."""
        node = self._nodes.get(key)
        nodes = [] if node is None else [node]
        for each in nodes:
            nodes += [self._nodes[child] for child in each.children]
        return [each.state for each in reversed(nodes) if each.state is not None]
