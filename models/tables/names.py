"""Names of people, in two pools that share no first name and no surname.

A name part belongs to the held-out pool when the CRC-32 of its spelling is 0 modulo ``HELD_OUT``.
The rule needs no list, so it also holds for the syllable-composed names, of which there are more
than could be written down.
"""

import random
import zlib
from collections.abc import Callable

from models.tables.words import words

_REAL = 0.3  # share of real-looking names; less in the smaller pool, or every table had namesakes
_REAL_HELD_OUT = 0.1
HELD_OUT = 8  # one name part in this many is kept for evaluation

FIRST = words("first_names")

LAST = words("surnames")

_ONSETS = words("onsets")
_VOWELS = words("vowels")
_CODAS = words("codas")
_SURNAME_ENDINGS = words("surname_endings")


def is_held_out(part: str) -> bool:
    """Whether a first name or surname is reserved for evaluation."""
    return zlib.crc32(part.encode()) % HELD_OUT == 0


def syllables(rng: random.Random, count: int) -> str:
    """A made-up lower-case word of so many syllables."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def _first(rng: random.Random, real: float) -> str:
    if rng.random() < real:
        return rng.choice(FIRST)
    return syllables(rng, 2 if rng.random() < 0.88 else 3).capitalize()


def _last(rng: random.Random, real: float) -> str:
    if rng.random() < real:
        return rng.choice(LAST)
    if rng.random() < 0.5:
        return (syllables(rng, 1) + rng.choice(_SURNAME_ENDINGS)).capitalize()
    return syllables(rng, 2).capitalize()


def _from_pool(
    draw: Callable[[random.Random, float], str], rng: random.Random, held_out: bool
) -> str:
    real = _REAL_HELD_OUT if held_out else _REAL
    while True:
        part = draw(rng, real)
        if len(part) >= 3 and is_held_out(part) == held_out:
            return part


def first_name(rng: random.Random, held_out: bool) -> str:
    """A first name of the training pool or of the held-out one."""
    return _from_pool(_first, rng, held_out)


def surname(rng: random.Random, held_out: bool) -> str:
    """A surname of the training pool or of the held-out one."""
    return _from_pool(_last, rng, held_out)
