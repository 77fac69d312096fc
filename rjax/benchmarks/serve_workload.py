"""Prompts with shared prefixes, and their arrival times."""

import dataclasses
import math
import random
from typing import Any

# Random words, so that no model has seen the text.
_FIRST = ("ba", "co", "di", "fen", "gar", "hol", "lim", "mo", "ner", "pal", "ro", "sun")
_LAST = ("ber", "cal", "den", "ka", "lo", "man", "nis", "por", "ra", "ston", "ta", "vel")
_WORDS = [first + last for first in _FIRST for last in _LAST]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one benchmark, determined by the seed.

    Attributes:
        model: the model's name on the server.
        prefixes: number of different prefixes; each request draws one.
        prefix_words, suffix_words: words of a prefix, and of the unique suffix of each request.
        max_tokens: most tokens of an answer.
        chat: whether to use the chat route, with the prefix as system message.
        ignore_eos: whether each answer has exactly ``max_tokens``.
        temperature: the sampling temperature.
        seed: seed of words, prefixes and arrivals.
    """

    model: str
    prefixes: int = 1
    prefix_words: int = 1024
    suffix_words: int = 32
    max_tokens: int = 64
    chat: bool = False
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0

    @property
    def path(self) -> str:
        """Path of the route, behind the server's URL."""
        return "/chat/completions" if self.chat else "/completions"

    def warm_up(self) -> list[dict[str, Any]]:
        """One request for each prefix, sent before the measurement."""
        draw = random.Random(f"{self.seed} warm-up")
        return [self._body(i, _words(draw, self.suffix_words)) for i in range(self.prefixes)]

    def bodies(self, point: int, count: int) -> list[dict[str, Any]]:
        """The requests of one point of the sweep; suffixes differ between points."""
        draw = random.Random(f"{self.seed} point {point}")
        return [
            self._body(draw.randrange(self.prefixes), _words(draw, self.suffix_words))
            for _ in range(count)
        ]

    def arrivals(self, point: int, count: int, rate: float) -> list[float]:
        """Arrival times in seconds: exponential gaps with mean 1 / rate."""
        if math.isinf(rate):
            return [0.0] * count
        draw = random.Random(f"{self.seed} arrivals {point}")
        found, now = [], 0.0
        for _ in range(count):
            found.append(now)
            now += draw.expovariate(rate)
        return found

    def _body(self, prefix: int, suffix: str) -> dict[str, Any]:
        beginning = _words(random.Random(f"{self.seed} prefix {prefix}"), self.prefix_words)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.chat:
            body["messages"] = [
                {"role": "system", "content": beginning},
                {"role": "user", "content": suffix},
            ]
        else:
            body["prompt"] = f"{beginning}\n{suffix}"
        return body


def _words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(_WORDS, k=count))
