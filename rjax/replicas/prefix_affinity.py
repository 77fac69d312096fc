"""Chooses a replica by the prefixes that it was given before and by its load."""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

type Reason = Literal["prefix", "overloaded", "new"]

_MOST_KEYS = 262_144  # remembered blocks, about 64 MiB of prompts


@dataclasses.dataclass(frozen=True, slots=True)
class Choice[R]:
    """The ranking of the replicas for a request.

    Attributes:
        ranked: replicas from the best to the worst.
        reason: "prefix": the replica with the longest known prefix; "overloaded": that replica has
            too many requests; "new": no replica knows a prefix.
        matched: leading blocks that the best replica was given before.
    """

    ranked: list[R]
    reason: Reason
    matched: int


class PrefixAffinity[R]:
    """Remembers which replica was given which block, and ranks replicas for a prompt.

    The score of a replica is the share of the prompt's blocks that it was given before, less its
    load: requests under way beyond those of the least loaded replica, in units of ``tolerance``. A
    prompt whose prefix is all known thus stays with its replica until it has ``tolerance``
    requests more than another. Among equals the replica with fewer blocks is better.

    The memory is bounded: blocks that were used longest ago are forgotten, as in the caches that it
    stands for.

    Args:
        tolerance: requests that outweigh a prompt that is all cached.
        most_keys: most blocks that are remembered.
    """

    def __init__(self, tolerance: float, most_keys: int = _MOST_KEYS) -> None:
        self._tolerance = tolerance
        self._most_keys = most_keys
        self._holders: OrderedDict[bytes, set[R]] = OrderedDict()
        self._num_blocks: dict[R, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def matched(self, blocks: Sequence[bytes]) -> dict[R, int]:
        """Number of leading blocks of a prompt that each replica was given before, if any."""
        found: dict[R, int] = {}
        for number, key in enumerate(blocks):
            holders = self._holders.get(key)
            if holders is None:
                break
            here = [r for r in holders if found.get(r, 0) == number]
            if not here:
                break
            for replica in here:
                found[replica] = number + 1
        return found

    def choose(self, blocks: Sequence[bytes], loads: Mapping[R, float]) -> Choice[R]:
        """Rank the replicas for a prompt, without remembering it.

        Args:
            blocks: keys of the prompt, as `prefix_blocks` returns them.
            loads: requests under way, by replica; not empty.
        """
        matched = self.matched(blocks)
        least = min(loads.values())

        def score(replica: R) -> tuple[float, float]:
            share = matched.get(replica, 0) / len(blocks) if blocks else 0.0
            excess = (loads[replica] - least) / self._tolerance
            return excess - share, self._num_blocks.get(replica, 0)

        ranked = sorted(loads, key=score)
        longest = max((matched.get(r, 0) for r in loads), default=0)
        best = matched.get(ranked[0], 0)
        reason = "new" if not longest else "prefix" if best == longest else "overloaded"
        return Choice(ranked, reason, best)

    def remember(self, blocks: Sequence[bytes], replica: R) -> None:
        """Note that a replica is given this prompt."""
        for key in blocks:
            holders = self._holders.setdefault(key, set())
            if replica not in holders:
                holders.add(replica)
                self._num_blocks[replica] = self._num_blocks.get(replica, 0) + 1
        for key in reversed(blocks):  # the first block is forgotten last
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_keys:
            _, holders = self._holders.popitem(last=False)
            for holder in holders:
                self._num_blocks[holder] -= 1

    def keep_only(self, replicas: set[R]) -> None:
        """Forget the blocks of all other replicas: their caches are gone."""
        if not self._num_blocks.keys() - replicas:
            return
        for key in [key for key, held in self._holders.items() if not held <= replicas]:
            self._holders[key] &= replicas
            if not self._holders[key]:
                del self._holders[key]
        self._num_blocks = {r: n for r, n in self._num_blocks.items() if r in replicas}
