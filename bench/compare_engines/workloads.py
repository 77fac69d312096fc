"""The workloads of bench.compare_engines: lists of requests that every engine gets."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests of random token ids that arrive at once.

    Attributes:
        prefixes: tokens of each shared prefix; request i has the prefix i modulo their number.
        requests: number of them.
        unique: fewest and most further prompt tokens of a request.
        output: fewest and most tokens generated for a request.
        n: samples of each prompt. One is greedy; more are drawn at temperature 1.
    """

    prefixes: tuple[int, ...]
    requests: int
    unique: tuple[int, int]
    output: tuple[int, int]
    n: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return max(self.prefixes) + self.unique[1] + self.output[1]

    @property
    def sequences(self) -> int:
        """Sequences that may run at once."""
        return self.requests * self.n

    def scaled(self, by: int) -> "Workload":
        """The same with fewer tokens, prefixes, requests and samples, each divided by a number."""

        def less(number: int, least: int = 1) -> int:
            return max(least, number // by)

        return Workload(
            prefixes=tuple(less(length, 0) for length in self.prefixes[::by]),
            requests=less(self.requests),
            unique=(less(self.unique[0]), less(self.unique[1])),
            output=(less(self.output[0], 2), less(self.output[1], 2)),
            n=less(self.n, min(self.n, 2)),
        )

    def described(self) -> dict[str, Any]:
        """The columns of a table that say what the requests are."""
        few, most = min(self.prefixes), max(self.prefixes)
        return {
            "requests": self.requests,
            "n": self.n,
            "prefixes": len(self.prefixes) if most else 0,
            "prefix": _span(few, most),
            "unique": _span(*self.unique),
            "output": _span(*self.output),
        }

    def drawn(self, *, vocab_size: int, seed: int, max_num_seqs: int) -> dict[str, Any]:
        """The requests, for the task of `engine_side`.

        A decode step is measured where all sequences run in every step.

        Args:
            vocab_size: token ids are below it.
            seed: of the token ids and lengths.
            max_num_seqs: sequences that the engines run at once.
        """
        rng = np.random.default_rng(seed)
        shared = [rng.integers(0, vocab_size, length).tolist() for length in self.prefixes]
        prompts, max_tokens = [], []
        for i in range(self.requests):
            unique = rng.integers(0, vocab_size, rng.integers(*self.unique, endpoint=True))
            prompts.append(shared[i % len(shared)] + unique.tolist())
            max_tokens.append(int(rng.integers(*self.output, endpoint=True)))
        together = self.sequences <= max_num_seqs and self.output[0] == self.output[1] > 1
        return {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "n": self.n,
            "measure_step": together,
        }


def _span(few: int, most: int) -> int | str:
    return few if few == most else f"{few:,} to {most:,}"


WORKLOADS: dict[str, Workload] = {
    "shared": Workload((2048,), 64, (64, 64), (128, 128)),
    "prefixes": Workload((2048,) * 16, 256, (128, 128), (128, 128)),
    "unshared": Workload((0,), 64, (1040, 1040), (128, 128)),
    "samples": Workload((0,), 1, (1024, 1024), (256, 256), n=64),
    "long-prefix": Workload((8192,), 256, (64, 64), (128, 128)),
    "single": Workload((0,), 1, (1040, 1040), (128, 128)),
    "system-prompts": Workload(tuple(range(512, 4097, 512)), 400, (100, 200), (120, 240)),
    "chat": Workload((0,), 300, (200, 600), (100, 300)),
    "rollouts": Workload((0,), 32, (1024, 1024), (256, 256), n=16),
    "groups": Workload((0,), 8, (2048, 2048), (512, 512), n=64),
}
"""Workloads by name."""

DEFAULT: tuple[str, ...] = ("shared", "prefixes", "unshared", "samples")
"""Names of those that are measured by default."""
